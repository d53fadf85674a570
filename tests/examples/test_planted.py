"""Faults planted in foreign runtimes are caught and named, with watched modules and from final gradients alone."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
from planted import FAULTS, Planted
from test_whitebox_runtimes import RANKS, build_model, data, loss_fn, pipelining, zero_bubble

from pipeproof import StageByStage
from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.sweeps import SWEEP, some

OPEN = {"latest activation": "unknown"}  # of a stored activation nothing is observed; the others are located


def judged(whitebox: WhiteBox, fault: Planted, *, watched: bool) -> Verdict:
    step = partial(fault, watched=watched)
    return whitebox.validate(step, reference=build_model, microbatches=data(), ranks=RANKS, loss_fn=loss_fn)


CLOSED = [fault for fault in FAULTS if fault.runtime is not zero_bubble]  # its store is no backward of the stage's


def alone(model: None, microbatches: list[Any], *, step: Planted) -> Any:
    """The step, which makes the stages of its rank by itself."""
    return step(build_model(), microbatches)


def held_against_itself(whitebox: WhiteBox, fault: Planted) -> Verdict:
    by = StageByStage(loss_fn, build=build_model)
    return whitebox.validate(partial(alone, step=fault), reference=by, microbatches=data(), ranks=RANKS)


def located(fault: Planted, found: Cause) -> bool:
    """Whether ``found`` says all of the place that ``fault`` asks for."""
    asked = (fault.rank, fault.stage, fault.microbatches)
    said = (found.rank, found.stage, found.microbatches)
    return all(wanted in (None, (), observed) for wanted, observed in zip(asked, said, strict=True))


def outcome(fault: Planted, verdict: Verdict) -> str:
    """How well the first cause names ``fault``."""
    if verdict.outcome != "fail":
        return "missed"
    if not verdict.causes:
        return "unknown"
    found = verdict.causes[0]
    if found.kind != fault.kind:
        return "wrong"
    return "located" if located(fault, found) else "named"


@pytest.fixture(params=[True, pytest.param(False, marks=SWEEP)], ids=["watched", "final"])
def watched(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("faults", some([FAULTS[::2], FAULTS], left=[FAULTS]), ids=["some", "all"])
def test_faults_are_caught_and_named(whitebox: WhiteBox, faults: tuple[Planted, ...], watched: bool) -> None:
    found = {fault.name: outcome(fault, judged(whitebox, fault, watched=watched)) for fault in faults}
    assert found == {fault.name: OPEN.get(fault.name, "located") for fault in faults}


@SWEEP
def test_faults_are_named_as_well_where_a_step_is_held_against_itself(whitebox: WhiteBox) -> None:
    found = {fault.name: outcome(fault, held_against_itself(whitebox, fault)) for fault in CLOSED}
    # Of the layers of another rank nobody knows where the step's own names are taken for those of the whole model.
    assert {name for name, one in found.items() if one != "located"} == {"wrong layers"}, found


def test_there_are_enough_and_every_runtime_has_its_share() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert Counter(fault.runtime for fault in FAULTS) == {zero_bubble: 6, pipelining: 6}


def test_the_measure_can_fail() -> None:
    fault = Planted("x", lambda: None, "scale", rank=1)
    cause = Cause("scale", rank=1)

    def of(*causes: Cause) -> str:
        return outcome(fault, Verdict("", "fail", "none", (), causes=causes))

    assert [of(cause), of(Cause("scale")), of(Cause("dropped"), cause), of()] == [
        "located",
        "named",
        "wrong",
        "unknown",
    ]
    assert outcome(fault, Verdict("", "pass", "none", ())) == "missed"
