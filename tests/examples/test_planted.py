"""Faults planted in foreign runtimes are caught and named, with watched modules and from final gradients alone."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from planted import FAULTS, Planted
from test_whitebox_runtimes import RANKS, RUNTIMES, build_model, data, loss_fn, zero_bubble

from pipeproof import Contract, StageByStage
from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.sweeps import SWEEP, some

# At least these shares of all faults: named right and located where stages are watched, named right where they are not.
LOCATED, NAMED = 0.95, 0.85


def judged(whitebox: WhiteBox, fault: Planted, *, watched: bool) -> Verdict:
    step = partial(fault, watched=watched)
    return whitebox.validate(step, reference=build_model, microbatches=data(), ranks=RANKS, loss_fn=loss_fn)


CLOSED = [fault for fault in FAULTS if fault.runtime is not zero_bubble]  # its store is no backward of the stage's
NAMES: Mapping[str, Callable[[str, int, int], str]] = {
    "interleaved": lambda name, rank, module: f"{rank + RANKS * module}.{name}",
}
# What nobody sees where the step's own names are taken for those of the whole model.
OTHER_LAYERS = {"chunks exchanged", "wrong layers"}


def alone(model: None, microbatches: list[Any], *, step: Planted) -> Any:
    """The step, which makes the stages of its rank by itself."""
    return step(build_model(), microbatches)


def held_against_itself(whitebox: WhiteBox, fault: Planted) -> Verdict:
    by, names = StageByStage(loss_fn, build=build_model), NAMES.get(fault.runtime.__name__)
    step = partial(alone, step=fault)
    return whitebox.validate(step, reference=by, microbatches=data(), ranks=RANKS, contract=Contract(names=names))


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
    if found.kind not in (fault.kind, *fault.alike):
        return "wrong"
    return "located" if located(fault, found) else "named"


@pytest.fixture(params=[True, pytest.param(False, marks=SWEEP)], ids=["watched", "final"])
def watched(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("faults", some([FAULTS[1::3], FAULTS], left=[FAULTS]), ids=["some", "all"])
def test_faults_are_caught_and_named(whitebox: WhiteBox, faults: tuple[Planted, ...], watched: bool) -> None:
    found = {fault.name: outcome(fault, judged(whitebox, fault, watched=watched)) for fault in faults}
    counts = Counter(found.values())
    told = f"{dict(counts)}: {found}"
    assert counts["missed"] == counts["wrong"] == 0, told
    if watched:
        assert counts["located"] >= LOCATED * len(faults), told
    else:
        assert counts["located"] + counts["named"] >= NAMED * len(faults), told


@SWEEP
def test_faults_are_named_as_well_where_a_step_is_held_against_itself(whitebox: WhiteBox) -> None:
    found = {fault.name: outcome(fault, held_against_itself(whitebox, fault)) for fault in CLOSED}
    assert {name for name, one in found.items() if one != "located"} == OTHER_LAYERS, found


def test_there_are_enough_and_every_runtime_has_its_share() -> None:
    assert len(FAULTS) >= 20
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    shares = Counter(fault.runtime for fault in FAULTS)
    assert set(shares) == set(RUNTIMES)
    assert min(shares.values()) >= 5


def test_the_measure_can_fail() -> None:
    fault = Planted("x", lambda: None, "scale", rank=1, alike=("sign",))
    cause = Cause("scale", rank=1)

    def of(*causes: Cause) -> str:
        return outcome(fault, Verdict("", "fail", "none", (), causes=causes))

    assert [of(cause), of(Cause("sign")), of(Cause("dropped"), cause), of()] == ["located", "named", "wrong", "unknown"]
    assert outcome(fault, Verdict("", "pass", "none", ())) == "missed"
