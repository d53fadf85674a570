"""Diagnosis of real runs: what was planted is named, what nobody knows is not, and what is right has no cause."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.observed import Observed, RankOperation
from pipeproof.core.observe.recording import FLOWED, GIVEN, HANDED_ON, MADE, OUTPUT, Point, Recording, Site
from pipeproof.core.verdict import Verdict
from pipeproof.explain.evidence import Evidence, of_run
from pipeproof.explain.rules.boundaries import boundaries
from pipeproof.explain.rules.report import norm
from pipeproof.explain.rules.weights import weights
from pipeproof.own.case import Case
from pipeproof.own.judgement import diagnose, judge, setup_of
from pipeproof.own.observe import observe
from pipeproof.own.validator import explain_case, validate
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.wings.specimens.trial import is_located, smallest_of
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sweeps import sampled

CASE = Case("gpipe", 2, 1, 3, (1, 1), model="mlp", plan=("train",))


@pytest.fixture(scope="module")
def runs(world: World) -> tuple[Observed, Observed]:
    """A sound run, not recorded and recorded."""
    return observe(CASE, world), observe(CASE, world, record=True)


def each(observed: Observed, change: Callable[[int, RankOperation], RankOperation]) -> Observed:
    """``observed`` with something else in each rank's only operation."""
    return replace(observed, ranks=tuple((change(rank, one),) for rank, (one,) in enumerate(observed.ranks)))


def changed(observed: Observed, site: Site, by: Callable[[Tensor], Tensor]) -> Observed:
    """``observed`` with one final gradient in place of what it was; the update stays, so that it is the gradient's."""

    def change(rank: int, one: RankOperation) -> RankOperation:
        held = dict(one.gradients or {})
        right = held.get(site)
        return one if right is None else replace(one, gradients=held | {site: by(right)})

    return each(observed, change)


def recorded_with(observed: Observed, change: Callable[[Recording], Recording]) -> Observed:
    """``observed`` with something else in its recording."""
    return each(observed, lambda rank, one: replace(one, recording=one.recording and change(one.recording)))


def named(observed: Observed) -> Verdict:
    return diagnose(CASE, observed, judge(CASE, observed))


def evidence(observed: Observed, case: Case = CASE) -> Evidence:
    """What a diagnosis of ``observed`` rests on, with a gradient made wrong so that there is something to explain."""
    wrong = changed(observed, next(iter(observed.gradients(0))), lambda one: one * 3)
    return of_run(setup_of(case), wrong, judge(case, wrong))


def drawn_like(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)


SITE = (1, "blocks.1.linear.weight")


@pytest.mark.sweep
def test_recording_changes_no_bit_and_a_right_run_has_no_cause(runs: tuple[Observed, Observed], world: World) -> None:
    plain, recorded = runs
    right = {site: one.tolist() for site, one in plain.gradients(0).items() if one is not None}
    assert {site: one.tolist() for site, one in recorded.gradients(0).items() if one is not None} == right
    assert (recorded.recording(0) is None, plain.recording(0) is None) == (False, True)
    for observed in runs:
        verdict = named(observed)
        assert (verdict.outcome, verdict.causes, verdict.undecided) == ("pass", (), ())
    for dtype in ("fp32", "bf16"):
        case = replace(CASE, dtype=dtype)
        wrong = evidence(observe(case, world, record=True), case)
        assert weights(wrong) == boundaries(wrong) == norm(wrong) == []


@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_is_named_with_and_without_a_recording(runs: tuple[Observed, Observed], which: int) -> None:
    for by, kind in ((3.0, "scale"), (-1.0, "sign"), (0.0, "zero")):
        (cause,) = named(changed(runs[which], SITE, lambda one, by=by: one * by)).causes  # type: ignore[misc]
        assert (cause.kind, cause.stage, cause.parameter) == (kind, *SITE)
        assert cause.factor == (pytest.approx(by, rel=1e-3) if by else None)


def test_noise_is_nobodys_and_stays_unknown_without_a_recording(runs: tuple[Observed, Observed]) -> None:
    verdict = named(changed(runs[0].final(), SITE, lambda one: drawn_like(one) * one.norm()))
    assert (verdict.outcome, verdict.causes) == ("fail", ())
    assert "no multiple" in verdict.undecided[0]


def test_a_first_divergence_says_whose_tensor_it_was(world: World) -> None:
    planted = replace(CASE, specimen="activations-crossed")
    verdict = validate(planted, world)
    cause = verdict.causes[0]
    assert (cause.kind, cause.rank, cause.stage, cause.microbatches) == ("wrong-message", 1, 1, (0, 1))
    golden(cause.detail)
    assert cause.action == "1F0"
    assert f"            {cause}" in verdict.details
    assert len(verdict.details.splitlines()) <= 30
    assert asdict(verdict.causes[0]) == verdict.as_dict()["causes"][0]  # type: ignore[index]
    ran = verdict.measured.ran
    one = next(done for done in ran.ranks[1] if done.action == "1F0")
    wrong = [sight for sight in one.sights if not sight.agrees]
    golden("\n".join(sorted({sight.what for sight in wrong})))
    (came,) = [sight for sight in wrong if sight.really]
    assert (came.what, came.made, came.really, came.expected) == ("input", False, "0F1", "0F0")
    assert all(sight.error > sight.limit for sight in wrong if sight.error is not None and sight.limit is not None)
    assert all(sight.agrees for sight in ran.ranks[0][0].sights)
    assert not any(sight.what == "input gradient" for done in ran.ranks[0] for sight in done.sights)  # there is none
    assert {one.law for one in verdict.measured.compared} == {"loss", "gradient", "grad-norm"}


def test_what_does_not_happen_again_is_said(world: World) -> None:
    """A second, recorded run that is right: whatever was wrong in the first is not seeded."""
    wrong = changed(observe(CASE, world), SITE, lambda one: one * 3)
    verdict = explain_case(CASE, world, wrong, judge(CASE, wrong))
    assert verdict.causes[0].kind == "scale"
    golden("\n".join(verdict.undecided), numbers=False)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda one: one.half().float(), "rounded", "its own, fp16-rounded"),
        (lambda one: one.bfloat16().float(), "rounded", "its own, bf16-rounded"),
        (lambda one: one.T.contiguous(), "altered", "put in another order"),
        (lambda one: one * 0, "altered", "cleared"),
        (lambda one: one * 1.05, "altered", "multiplied by 1.05"),
        (lambda one: one / 0, "not-finite", "made not finite"),
        (lambda one: drawn_like(one) * one.std(), "randomness", "drawn otherwise"),
    ],
)
def test_what_weights_became_before_the_step_is_told(
    runs: tuple[Observed, Observed], change: Callable[[Tensor], Tensor], kind: str, words: str
) -> None:
    def begun(one: Recording) -> Recording:
        matrices = {site: change(value) for site, value in one.parameters.items() if site[0] == 1 and value.dim() > 1}
        return replace(one, parameters={**one.parameters, **matrices})

    (cause,) = weights(evidence(recorded_with(runs[1], begun)))
    assert (cause.kind, cause.stage) == (kind, 1)
    assert words in cause.detail


NORMS: dict[str, Callable[[list[float], list[float], float], list[float]]] = {  # of stages, parameters and elements
    "the 1-norm": lambda stages, each, sum_: [sum_] * 2,
    "the sum of the parameters' norms": lambda stages, each, sum_: [sum(each)] * 2,
    "its square": lambda stages, each, sum_: [sum(one**2 for one in each)] * 2,
    "that with every square 2 times": lambda stages, each, sum_: [math.hypot(*each, *each)] * 2,
    "the sum of stages": lambda stages, each, sum_: [sum(stages)] * 2,
    "the largest of stages": lambda stages, each, sum_: [max(stages)] * 2,
    "each rank's own": lambda stages, each, sum_: stages,
    "one stage twice": lambda stages, each, sum_: [math.hypot(stages[0], *stages)] * 2,
}


@pytest.mark.parametrize("title", NORMS)
def test_other_norms_of_the_same_gradients_are_told(runs: tuple[Observed, Observed], title: str) -> None:
    """That of several ranks is no single rank's."""
    held = {site: one.double() for site, one in runs[1].gradients(0).items() if one is not None}
    stages = [math.hypot(*(float(one.norm()) for site, one in held.items() if site[0] == stage)) for stage in range(2)]
    sizes = [float(one.norm()) for one in held.values()]
    values = NORMS[title](stages, sizes, sum(float(one.abs().sum()) for one in held.values()))
    wrong = each(runs[1], lambda rank, one: replace(one, norm=values[rank]))
    (cause,) = norm(of_run(setup_of(CASE), wrong, judge(CASE, wrong)))
    golden(f"{cause.kind} {cause}", numbers=False)


def test_tensors_that_cross_one_boundary_are_told_from_each_other(world: World) -> None:
    case = Case("1f1b", 3, 1, 2, (1, 1, 1), model="pair", plan=("train",))
    right = observe(case, world, record=True)
    assert boundaries(evidence(right, case)) == []
    for where, kind in (
        (FLOWED, "wrong-message"),
        (GIVEN, "wrong-message"),
        (OUTPUT, "wrong-message"),
        (MADE, "computation"),
    ):

        def crossed(one: Recording, where: str = where) -> Recording:
            of_second = {at: tuple(reversed(observed)) for at, observed in one.tensors.items() if at[::2] == (1, where)}
            return replace(one, tensors={**one.tensors, **of_second})

        (cause,) = boundaries(evidence(recorded_with(right, crossed), case))
        assert (cause.kind, cause.stage) == (kind, 1)
        golden(cause.detail, numbers=False)


@pytest.mark.sweep
def test_gradients_that_an_earlier_microbatchs_are_left_in_have_an_extra_term(runs: tuple[Observed, Observed]) -> None:
    def left(one: Recording) -> Recording:
        first, second = (Point(1, m, HANDED_ON) for m in (0, 1))
        if first not in one.tensors:
            return one
        (old,), (new,) = one.tensors[first], one.tensors[second]
        assert old is not None
        assert new is not None
        return replace(one, tensors={**one.tensors, second: (old + new,)})

    (cause,) = boundaries(evidence(recorded_with(runs[1], left)))
    assert (cause.kind, cause.stage, cause.microbatches) == ("extra-term", 1, (1,))
    golden(cause.detail, numbers=False)


COARSE = {
    "microbatch-doubled": "doubled",
    "stage-negated": "sign",
    "replicas-summed": "scale",
    "gradients-not-cleared": "stale-gradient",
    "tied-not-reduced": "tied-not-summed",
    "loss-summed": "report",
    "targets-shifted": "swapped-data",
    "weight-half-undivided": "scale",
}


@pytest.mark.parametrize("name", COARSE)
def test_faults_of_a_run_in_bf16_are_named(world: World, name: str) -> None:
    verdict = validate(replace(smallest_of(SPECIMENS[name]), dtype="bf16"), world)
    assert verdict.outcome == "fail"
    assert verdict.causes[0].kind == COARSE[name]
    assert is_located(SPECIMENS[name].cause(smallest_of(SPECIMENS[name])), verdict.causes[0])


@pytest.mark.sweep
@pytest.mark.parametrize("name", sampled([name for name, one in SPECIMENS.items() if one.family == "tied"], 2))
def test_faults_with_tied_parameters_in_bf16_are_named_from_final_gradients(world: World, name: str) -> None:
    """What one rounding is to a sum may be much to a share: copies are told by whole shares, not by looks."""
    case, specimen = replace(smallest_of(SPECIMENS[name]), dtype="bf16"), SPECIMENS[name]
    observed = observe(case, world)
    verdict = diagnose(case, observed.final(), judge(case, observed))
    assert verdict.outcome == "fail"
    assert {cause.kind for cause in verdict.causes} <= {specimen.fault.kind, *specimen.fault.alike}
    assert verdict.causes


@pytest.mark.sweep
def test_a_loss_that_was_computed_right_supposes_no_other_computation(world: World) -> None:
    """In bf16 to round an input to bf16 changes nothing, so that it would explain right gradients."""
    case = replace(smallest_of(SPECIMENS["loss-of-other-ranks"]), dtype="bf16")
    observed = observe(case, world)
    verdict = diagnose(case, observed.final(), judge(case, observed))
    assert verdict.outcome == "fail"
    assert [cause.kind for cause in verdict.causes if cause.kind != "report"] == []
