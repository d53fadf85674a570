"""One planted fault in one case: what counts as caught, as named and as located."""

from dataclasses import replace

import pytest

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Verdict
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.wings.specimens.trial import Named, Trial, case_for, compare_names, is_located, smallest_of, try_out
from pipeproof.worlds.world import World

RIGHT = Named("scale", True, True, 0.25)
TRIAL = Trial("one", "1f1b r2 s2 m2", "gradient", "scale", ("gradient", "grad-norm"), RIGHT, None, 0.5)


def verdict(*causes: Cause) -> Verdict:
    return Verdict("c", "fail", "none", (), causes=causes)


def test_a_fault_is_caught_by_its_own_law() -> None:
    assert TRIAL.caught
    assert not replace(TRIAL, laws=("grad-norm",)).caught
    assert TRIAL.as_dict()["caught"] is True


def test_a_diagnosis_is_right_wrong_or_unknown() -> None:
    one = SPECIMENS["stage-negated"]
    case = smallest_of(one)
    planted = one.cause(case)
    assert compare_names(planted, verdict(planted)) == Named("sign", True, True, 0.0)
    misplaced = compare_names(planted, verdict(replace(planted, stage=None)))
    assert (misplaced.right, misplaced.located, misplaced.wrong) == (True, False, False)
    assert compare_names(planted, verdict(Cause("scale"), planted), alike=one.fault.alike).wrong
    assert not compare_names(planted, verdict()).wrong


def test_what_final_gradients_cannot_tell_apart_will_do_for_them_alone() -> None:
    one = SPECIMENS["gradient-repeated"]
    planted, found = one.cause(smallest_of(one)), verdict(Cause("swapped-gradients"))
    assert compare_names(planted, found, alike=one.fault.alike).right
    assert not compare_names(planted, found).right


def test_a_place_is_right_if_it_says_all_that_was_planted() -> None:
    planted = Cause("dropped", rank=1, stage=2, microbatches=(0,))
    assert is_located(planted, replace(planted, action="2F0", parameter="w", factor=0.0))
    assert not is_located(planted, replace(planted, microbatches=(1,)))
    assert not is_located(planted, replace(planted, stage=None))
    assert is_located(Cause("norm"), planted)


def test_a_case_has_what_its_specimen_needs() -> None:
    case = case_for(SPECIMENS["mean-of-means"], "interleaved")
    assert (case.stages, case.loss, case.unequal, case.plan, case.specimen) == (
        8,
        "tokens",
        True,
        ("train",),
        "mean-of-means",
    )
    assert case_for(SPECIMENS["layer-skipped"], "1f1b").split == (2, 2, 2, 2)
    assert case_for(SPECIMENS["tied-not-reduced"], "gpipe").model == "gpt-tied"


@pytest.mark.sweep
def test_a_trial_without_a_recording_has_only_what_a_foreign_runtime_hands_back(world: World) -> None:
    found = try_out(case_for(SPECIMENS["stage-negated"], "1f1b", microbatches=2), world, record=False)
    assert found.recorded is None
    assert (found.final.kind, found.final.located) == ("sign", True)
