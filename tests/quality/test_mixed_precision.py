"""Mixed precision: steps that are right pass, and each that forgets a convention is caught, named and located.

Every sentence of a verdict is held against the truth, and the cause's is held word for word.
"""

from collections.abc import Mapping

import pytest
from truth_check import Counts, Truth, check

from pipeproof.whitebox import WhiteBox
from pipeproof.wings.specimens.mixed import MIXED, RANKS, RIGHT, run_mixed, validate_mixed
from pipeproof.wings.specimens.mixed_step import COUNT
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.mixed_by_hand import seen_from_outside
from tests.support.sweeps import each_once

# What is wrong: what else a verdict calls right must be so.
WRONG: Mapping[str, str] = {
    "loss-scaled-twice": "boundary gradients",
    "loss-not-scaled": "boundary gradients",
    "never-unscaled": "gradients",
    "unscaled-twice": "gradients",
    "clipped-before-unscaling": "gradients norm clip",
    "norm-before-unscaling": "norm clip",
    "scale-grown-on-one-rank": "gradients",
    "scale-updated-early": "gradients",
    "overflow-observed-by-one-rank": "update",
    "step-skipped-on-one-rank": "update",
    "accumulated-in-bf16": "sums gradients",
    "sum-rounded": "gradients",
    "activations-sent-in-bf16": "boundary messages",
    "gradients-sent-in-bf16": "boundary messages",
    "masters-not-copied-back": "update",
    "masters-of-other-weights": "update",
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
    verdict, fault = validate_mixed(MIXED[name], world), MIXED[name].fault
    trial = run_mixed(MIXED[name], verdict)
    assert trial.caught, trial
    assert trial.recorded.right, trial
    assert trial.recorded.located, trial
    (cause,) = verdict.causes
    golden(str(cause))
    place = () if fault.rank is None else (fault.rank,)
    truth = Truth((fault.kind,), frozenset(WRONG[name].split()), ranks=place, stages=place, somewhere=not place)
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
    wrong = frozenset(WRONG[name].split()) - {"boundary" if name == "loss-not-scaled" else ""}  # nor does that one
    truth = Truth(kinds, wrong, ranks=place, stages=place, somewhere=not place)
    found = check(verdict, truth, Counts(RANKS, RANKS, COUNT), watched=watched)
    assert found.caught, str(verdict)
    assert found.false == (), str(verdict)
    assert found.naming == "right" or (found.naming == "unknown" and not watched), str(verdict)


_OF_LOSSES = ("loss-scaled-twice", "loss-not-scaled")
