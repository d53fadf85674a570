"""Diagnosis of real runs: what was planted is named, what nobody knows is not, and what is right has no cause."""

from dataclasses import asdict, replace

import pytest
import torch

from validation.case import Case
from validation.diagnose import diagnose
from validation.judge import judge
from validation.observe import observe
from validation.observed import Observed
from validation.recording import Site
from validation.validator import explained, validate
from validation.verdict import Verdict, told
from validation.world import World

CASE = Case("gpipe", 2, 1, 3, (1, 1), model="mlp", plan=("train",))


@pytest.fixture(scope="module")
def runs(world: World) -> tuple[Observed, Observed]:
    """A sound run, not recorded and recorded."""
    return observe(CASE, world), observe(CASE, world, record=True)


def changed(observed: Observed, site: Site, gradient: torch.Tensor) -> Observed:
    """``observed`` with one final gradient in place of what it was; the update stays, so that it is the gradient's."""
    ranks = [list(rank) for rank in observed.ranks]
    for rank in ranks:
        held = dict(rank[0].gradients or {})
        if site in held:
            rank[0] = replace(rank[0], gradients=held | {site: gradient})
    return replace(observed, ranks=tuple(map(tuple, ranks)))


def named(observed: Observed) -> Verdict:
    return diagnose(CASE, observed, judge(CASE, observed))


SITE = (1, "blocks.1.linear.weight")


def test_a_sound_run_has_no_cause(runs: tuple[Observed, Observed]) -> None:
    for observed in runs:
        verdict = named(observed)
        assert (verdict.verdict, verdict.cause, verdict.undecided) == ("pass", (), ())


def test_recording_changes_no_bit(runs: tuple[Observed, Observed]) -> None:
    plain, recorded = runs
    for site, gradient in plain.gradients(0).items():
        other = recorded.gradients(0)[site]
        assert gradient is not None
        assert other is not None
        assert torch.equal(gradient, other)
    assert recorded.recording(0) is not None
    assert plain.recording(0) is None


@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_is_named_with_and_without_a_recording(runs: tuple[Observed, Observed], which: int) -> None:
    right = runs[which].gradients(0)[SITE]
    assert right is not None
    for gradient, kind, factor in ((right * 3, "scale", 3.0), (-right, "sign", -1.0), (right * 0, "zero", None)):
        verdict = named(changed(runs[which], SITE, gradient))
        assert (verdict.cause[0].kind, verdict.cause[0].stage, verdict.cause[0].parameter) == (kind, *SITE)
        assert verdict.cause[0].factor == (None if factor is None else pytest.approx(factor, rel=1e-3))


def test_noise_is_nobodys_and_stays_unknown_without_a_recording(runs: tuple[Observed, Observed]) -> None:
    right = runs[0].gradients(0)[SITE]
    assert right is not None
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0)) * right.norm()
    verdict = named(changed(runs[0].final(), SITE, noise))
    assert verdict.verdict == "fail"
    assert verdict.cause == ()
    assert "no multiple" in verdict.undecided[0]
    assert "cause     unknown: the evidence does not decide" in str(verdict)


def test_a_first_divergence_says_whose_tensor_it_was(world: World) -> None:
    planted = replace(CASE, specimen="activations-crossed")
    verdict = validate(planted, world)
    cause = verdict.cause[0]
    assert (cause.kind, cause.rank, cause.stage, cause.microbatches) == ("wrong-message", 1, 1, (0, 1))
    assert "microbatch 1's, expected microbatch 0's" in cause.detail
    assert cause.action == "1F0"
    assert f"            {told(cause)}" in str(verdict)
    assert len(str(verdict).splitlines()) <= 30
    assert asdict(verdict.cause[0]) == verdict.as_dict()["cause"][0]  # type: ignore[index]


def test_what_does_not_happen_again_is_said(world: World) -> None:
    """A second, recorded run that is right: whatever was wrong in the first is not seeded."""
    plain = observe(CASE, world)
    right = plain.gradients(0)[SITE]
    assert right is not None
    wrong = changed(plain, SITE, right * 3)
    verdict = explained(CASE, world, wrong, judge(CASE, wrong))
    assert verdict.cause[0].kind == "scale"
    assert "not reproduced: a second, recorded run was right" in verdict.undecided
