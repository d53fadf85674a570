"""Diagnosis of real runs: what was planted is named, what nobody knows is not, and what is right has no cause."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import pytest
import torch

from pipeproof.core.cause import Cause
from pipeproof.core.observe.observed import Observed
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


@pytest.mark.sweep
def test_a_sound_run_has_no_cause(runs: tuple[Observed, Observed]) -> None:
    for observed in runs:
        verdict = named(observed)
        assert (verdict.outcome, verdict.causes, verdict.undecided) == ("pass", (), ())


@pytest.mark.sweep
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
        assert (verdict.causes[0].kind, verdict.causes[0].stage, verdict.causes[0].parameter) == (kind, *SITE)
        assert verdict.causes[0].factor == (None if factor is None else pytest.approx(factor, rel=1e-3))


def test_noise_is_nobodys_and_stays_unknown_without_a_recording(runs: tuple[Observed, Observed]) -> None:
    right = runs[0].gradients(0)[SITE]
    assert right is not None
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0)) * right.norm()
    verdict = named(changed(runs[0].final(), SITE, noise))
    assert verdict.outcome == "fail"
    assert verdict.causes == ()
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
    assert ran is not None
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
    plain = observe(CASE, world)
    right = plain.gradients(0)[SITE]
    assert right is not None
    wrong = changed(plain, SITE, right * 3)
    verdict = explain_case(CASE, world, wrong, judge(CASE, wrong))
    assert verdict.causes[0].kind == "scale"
    golden("\n".join(verdict.undecided), numbers=False)


def evidence(observed: Observed, case: Case = CASE) -> Evidence:
    """What a diagnosis of ``observed`` rests on, with a gradient made wrong so that there is something to explain."""
    right = observed.gradients(0)[next(iter(observed.gradients(0)))]
    assert right is not None
    wrong = changed(observed, next(iter(observed.gradients(0))), right * 3)
    return of_run(setup_of(case), wrong, judge(case, wrong))


def recorded_with(observed: Observed, change: Callable[[Recording], Recording]) -> Observed:
    """``observed`` with something else in its recording."""
    ranks = [list(rank) for rank in observed.ranks]
    for rank in ranks:
        assert rank[0].recording is not None
        rank[0] = replace(rank[0], recording=change(rank[0].recording))
    return replace(observed, ranks=tuple(map(tuple, ranks)))


def drawn_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)


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
    runs: tuple[Observed, Observed], change: Callable[[torch.Tensor], torch.Tensor], kind: str, words: str
) -> None:
    def begun(one: Recording) -> Recording:
        matrices = {site: change(value) for site, value in one.parameters.items() if site[0] == 1 and value.dim() > 1}
        return replace(one, parameters={**one.parameters, **matrices})

    (cause,) = weights(evidence(recorded_with(runs[1], begun)))
    assert (cause.kind, cause.stage) == (kind, 1)
    assert words in cause.detail


@pytest.mark.sweep
def test_weights_that_stay_are_no_cause(runs: tuple[Observed, Observed]) -> None:
    assert weights(evidence(runs[1])) == []


NORMS: dict[str, Callable[[list[torch.Tensor]], float]] = {
    "the 1-norm": lambda each: sum(float(one.abs().sum()) for one in each),
    "the sum of the parameters' norms": lambda each: sum(float(one.norm()) for one in each),
    "its square": lambda each: sum(float(one.norm()) ** 2 for one in each),
    "that with every square 2 times": lambda each: (2 * sum(float(one.norm()) ** 2 for one in each)) ** 0.5,
}


def told_norms(observed: Observed, values: Sequence[float]) -> Cause:
    """The cause where the ranks report these norms."""
    ranks = [(replace(rank[0], norm=value),) for rank, value in zip(observed.ranks, values, strict=True)]
    wrong = replace(observed, ranks=tuple(ranks))
    (cause,) = norm(of_run(setup_of(CASE), wrong, judge(CASE, wrong)))
    return cause


@pytest.mark.parametrize("words", NORMS)
def test_other_norms_of_the_same_gradients_are_told(runs: tuple[Observed, Observed], words: str) -> None:
    held = [one.double() for one in runs[1].gradients(0).values() if one is not None]
    cause = told_norms(runs[1], [NORMS[words](held)] * 2)
    assert cause.stage is None
    assert cause.detail.endswith(f": {words}")


@pytest.mark.sweep
def test_a_norm_of_ranks_is_no_single_ranks(runs: tuple[Observed, Observed]) -> None:
    own = [
        sum(
            float(one.double().norm()) ** 2
            for site, one in runs[1].gradients(0).items()
            if site[0] == stage and one is not None
        )
        ** 0.5
        for stage in range(2)
    ]
    cause = told_norms(runs[1], [sum(own)] * 2)
    assert (cause.rank, cause.stage) == (None, None)
    golden(cause.detail, numbers=False)
    golden(told_norms(runs[1], [max(own)] * 2).detail, numbers=False)
    golden(told_norms(runs[1], own).detail, numbers=False)
    twice = told_norms(runs[1], [(2 * own[0] ** 2 + own[1] ** 2) ** 0.5] * 2)
    assert twice.stage == 0
    golden(twice.detail, numbers=False)


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
def test_a_right_run_in_bf16_names_nothing(world: World) -> None:
    case = replace(CASE, dtype="bf16")
    recorded = observe(case, world, record=True)
    assert judge(case, recorded).outcome == "pass"
    wrong = evidence(recorded, case)
    assert weights(wrong) == boundaries(wrong) == norm(wrong) == []


@pytest.mark.sweep
def test_a_loss_that_was_computed_right_supposes_no_other_computation(world: World) -> None:
    """In bf16 to round an input to bf16 changes nothing, so that it would explain right gradients."""
    case = replace(smallest_of(SPECIMENS["loss-of-other-ranks"]), dtype="bf16")
    observed = observe(case, world)
    verdict = diagnose(case, observed.final(), judge(case, observed))
    assert verdict.outcome == "fail"
    assert [cause.kind for cause in verdict.causes if cause.kind != "report"] == []
