"""Mixed precision: steps that are right pass, and each that forgets a convention is caught, named and located.

Every sentence of a verdict is held against the truth, and the cause's is held word for word.
"""

from collections.abc import Mapping

import pytest
from truth_check import Counts, Truth, check

from pipeproof.core.judge import LAWS
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.composed.check import LAWS as OF_A_CHAIN
from pipeproof.wings.specimens import IN_SIMULATION, ON_DEVICES, SPECIMENS
from pipeproof.wings.specimens.mixed import MIXED, RANKS, RIGHT, run_mixed, validate_mixed
from pipeproof.wings.specimens.mixed_step import COUNT
from pipeproof.wings.specimens.specimen import CLASSES
from pipeproof.worlds.world import World
from tests.support.mixed_by_hand import seen_from_outside
from tests.support.sweeps import each_once

_EVERY = "microbatches 0, 1, 2, 3, action"
_HALF = "1/2 = 1 / the number of stages or the number of ranks; divided by 2048, where losses were multiplied by 1024"
# What the verdict says of each, and what is wrong: what else it calls right must be so.
SAYS: Mapping[str, tuple[str, str]] = {
    "loss-scaled-twice": (
        "rank 1, stage 1, action 1B0: output gradient of the module of every microbatch is 1024 times the expected "
        "(1B0); 1024 is the loss scale",
        "boundary gradients",
    ),
    "loss-not-scaled": (
        "rank 1, stage 1, action 1B0: output gradient of the module of every microbatch is 0.000976562 times the "
        "expected (1B0); 1024 is the loss scale",
        "boundary gradients",
    ),
    "never-unscaled": ("everywhere: 1024 times; 1024 is the loss scale", "gradients"),
    "unscaled-twice": ("rank 1, stage 1: 0.000976562 times; 1024 is the loss scale", "gradients"),
    "clipped-before-unscaling": ("everywhere: 0.000582569 times", "gradients norm clip"),
    "norm-before-unscaling": (
        "everywhere: 171.653 in place of 0.16763: 1024 times the right one, which is the loss scale",
        "norm clip",
    ),
    "scale-grown-on-one-rank": (f"rank 0, stage 0: {_HALF}", "gradients"),
    "scale-updated-early": (f"everywhere: {_HALF}", "gradients"),
    "overflow-observed-by-one-rank": (
        "rank 0, stage 0: gradients overflow, so that every rank should skip its step; rank 1 did",
        "update",
    ),
    "step-skipped-on-one-rank": ("rank 1, stage 1: no weight moved, and rank 0 took its step", "update"),
    "accumulated-in-bf16": ("everywhere: every gradient", "sums gradients"),
    "sum-rounded": ("rank 1, stage 1: every gradient", "gradients"),
    "activations-sent-in-bf16": (
        f"rank 1, stage 1, {_EVERY} 1F0: input of every microbatch is bf16-rounded (1F0)",
        "boundary messages",
    ),
    "gradients-sent-in-bf16": (
        f"rank 0, stage 0, {_EVERY} 0B0: output gradient of every microbatch is bf16-rounded (0B0)",
        "boundary messages",
    ),
    "masters-not-copied-back": (
        "rank 0, stage 0: 0.0.weight, 0.0.bias, 0.2.weight, 0.2.bias: as before the step, while the master copy moved",
        "update",
    ),
    "masters-of-other-weights": (
        "rank 1, stage 1: 1.0.weight, 1.0.bias, 1.2.weight, 1.2.bias: as the step began, not the master copy in "
        "its own type",
        "update",
    ),
}


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", RIGHT)
def test_a_step_in_mixed_precision_that_is_right_passes(name: str, world: World) -> None:
    verdict = validate_mixed(RIGHT[name], world)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.law("updated-parameters").checked == 8 * (1 + bool(RIGHT[name].way.masters)), str(verdict)


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", MIXED)
def test_a_forgotten_convention_is_caught_named_and_located_and_every_word_is_true(name: str, world: World) -> None:
    verdict, (said, wrong), fault = validate_mixed(MIXED[name], world), SAYS[name], MIXED[name].fault
    trial = run_mixed(MIXED[name], verdict)
    assert trial.caught, trial
    assert trial.recorded is not None
    assert trial.recorded.right, trial
    assert trial.recorded.located, trial
    assert [str(cause) for cause in verdict.causes] == [said]
    place = () if fault.rank is None else (fault.rank,)
    truth = Truth((fault.kind,), frozenset(wrong.split()), ranks=place, stages=place, somewhere=not place)
    found = check(verdict, truth, Counts(RANKS, RANKS, COUNT))
    assert (found.naming, found.false, found.garbled) == ("right", (), ()), str(verdict)
    assert not verdict.alternatives


# What a white box calls by another name, or cannot see.
_UNKNOWN = {
    "overflow-observed-by-one-rank": "the reference's gradients overflow nowhere: it is another model",
    "masters-not-copied-back": "updates of master copies are not compared",
    "masters-of-other-weights": "updates of master copies are not compared",
}


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_passes_beside_one_device(name: str, whitebox: WhiteBox) -> None:
    verdict = seen_from_outside(RIGHT[name], whitebox)
    assert verdict.outcome == "pass", str(verdict)


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize(*each_once(name=[name for name in MIXED if name not in _UNKNOWN], watched=[True, False]))
def test_a_forgotten_convention_is_named_beside_one_device(name: str, watched: bool, whitebox: WhiteBox) -> None:
    verdict, fault = seen_from_outside(MIXED[name], whitebox, watched=watched), MIXED[name].fault
    kinds, place = (fault.kind,), () if fault.rank is None else (fault.rank,)
    if name in _OF_LOSSES:  # which are at no stage, but everywhere in gradients
        place = ()
    wrong = frozenset(SAYS[name][1].split()) - {"boundary" if name == "loss-not-scaled" else ""}  # nor does that one
    truth = Truth(kinds, wrong, ranks=place, stages=place, somewhere=not place)
    found = check(verdict, truth, Counts(RANKS, RANKS, COUNT), watched=watched)
    assert found.caught, str(verdict)
    assert found.false == (), str(verdict)
    assert found.naming == "right" or (found.naming == "unknown" and not watched), str(verdict)


_OF_LOSSES = ("loss-scaled-twice", "loss-not-scaled")


def test_every_fault_says_what_it_is() -> None:
    assert SAYS.keys() == MIXED.keys()
    assert not {*MIXED} & {*SPECIMENS, *ON_DEVICES, *IN_SIMULATION, *RIGHT}, "names are unique"
    for name, one in MIXED.items():
        assert (one.name, bool(one.summary), bool(one.origin)) == (name, True, True)
        assert one.fault.law in {*LAWS, *OF_A_CHAIN}
        assert one.classes
        assert {*one.classes} <= CLASSES.keys()
