"""The judge, on values: what was produced is altered by hand, and the right law must say so."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.judge import LAWS, Judge, one_thread, scenarios
from pipeproof.core.limits import FP32
from pipeproof.core.observe.observed import Observed, RankOperation
from pipeproof.core.observe.recording import Site
from pipeproof.core.oracle import Answer, Oracle, Requirements
from pipeproof.core.reason import Reason
from pipeproof.core.updates import Orders
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import FULL_PLAN, Case
from pipeproof.own.data import max_norm_of, model_for
from pipeproof.own.judgement import judge
from pipeproof.own.observe import observe
from pipeproof.own.stages import owners
from pipeproof.pipeline.schedule import Schedule
from pipeproof.reference.model import DTYPES, Model, build_model
from pipeproof.reference.step import Expected, Recipe, Reference, clip_factor
from pipeproof.whitebox import WhiteBox
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.steps import blocks, loss_fn, pairs
from tests.support.summed_wide import summed_wide

CASE = Case("1f1b", 1, 1, 3, (2,), model="mlp", ragged=True)
SLOT = (0, "blocks.1.linear.weight")
Change = Callable[[RankOperation], RankOperation]


@pytest.fixture(scope="module")
def observed(here: World) -> Observed:
    return observe(CASE, here)


def altered(observed: Observed, change: Change, *, operation: int = 0, rank: int = 0) -> Observed:
    rows = [list(row) for row in observed.ranks]
    rows[rank][operation] = change(rows[rank][operation])
    return replace(observed, ranks=tuple(map(tuple, rows)))


def alone(observed: Observed, change: Change) -> Observed:
    """Its first operation alone, changed."""
    return replace(observed, ranks=((change(observed.ranks[0][0]),),))


def of_slot(field: str, change: Callable[[Any], Tensor | None]) -> Change:
    """Change one parameter's tensor in ``field``."""

    def changed(ours: RankOperation) -> RankOperation:
        tensors = getattr(ours, field)
        return replace(ours, **{field: {**tensors, SLOT: change(tensors[SLOT])}})

    return changed


def wrong_gradient(case: Case, observed: Observed, factor: float, *, operation: int = 0) -> Observed:
    """``observed`` with a gradient that is off from the backward on: norm and update are those of it."""
    model, found = (
        model_for(case),
        altered(observed, of_slot("gradients", lambda one: one * factor), operation=operation),
    )
    reference = Reference(model, owner=owners(model, case.split), recipe=Recipe())
    for number in (k for k in range(operation + 1) if case.plan[k] == "train"):
        gradients = found.gradients(number)
        norm = reference.norm(gradients)
        parameters = reference.step(gradients, clip_factor(norm, max_norm_of(case, number)))
    return altered(found, lambda ours: replace(ours, norm=norm, parameters=parameters), operation=operation)


def failing(verdict: Verdict) -> set[str]:
    return {law.name for law in verdict.laws if law.outcome == "fail"}


def test_what_was_produced_passes_bit_for_bit_and_every_law_was_exercised(observed: Observed) -> None:
    verdict = judge(CASE, observed, measure=True)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise")
    assert [law.name for law in verdict.laws] == list(LAWS)
    assert {law.name: law.outcome for law in verdict.laws} == {
        name: "not applicable" if name in ("tied-copies", "buffers") else "pass" for name in LAWS
    }
    assert all(law.exact == law.checked > 0 for law in verdict.laws if law.outcome == "pass")
    assert 1e-8 < verdict.floor < 1e-5


def test_rounding_is_a_pass_of_the_second_tier(observed: Observed) -> None:
    verdict = judge(CASE, wrong_gradient(CASE, observed, 1 + 2**-22))
    assert (verdict.outcome, verdict.tier) == ("pass", "fp32")
    assert 1e-7 < verdict.law("gradient").worst < 1e-6


def test_more_than_rounding_and_less_than_surely_a_fault_is_unknown(observed: Observed) -> None:
    verdict = judge(CASE, wrong_gradient(CASE, observed, 1.00005))
    assert (verdict.outcome, verdict.tier, verdict.exit_status) == ("unknown", "none", 3)
    assert verdict.mismatches[0].parameter == SLOT[1]


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0, 1 / 3])
def test_a_wrong_gradient_names_the_law_and_the_parameter(observed: Observed, factor: float) -> None:
    verdict = judge(CASE, wrong_gradient(CASE, observed, factor))
    assert verdict.outcome == "fail"
    assert failing(verdict) == {"gradient"}
    assert [(m.law, m.parameter, m.rank, m.stage, m.operation) for m in verdict.mismatches] == [
        ("gradient", SLOT[1], 0, 0, 1)
    ]


def test_later_scenarios_are_not_judged_after_a_disagreement(observed: Observed) -> None:
    verdict = judge(CASE, wrong_gradient(CASE, observed, 2.0, operation=1))
    assert failing(verdict) == {"gradient", "second-step"}
    assert verdict.mismatches[0].operation == 2
    assert verdict.law("eval").outcome == verdict.law("accumulation").outcome == "unknown"
    assert verdict.law("eval").reasons == (Reason.EARLIER,)
    golden(verdict.law("eval").note)


@pytest.mark.parametrize(
    ("operation", "law"), [(1, "second-step"), (3, "accumulation"), (5, "eval")], ids=["second", "accumulated", "eval"]
)
def test_a_later_step_fails_the_law_of_its_scenario(observed: Observed, operation: int, law: str) -> None:
    assert failing(judge(CASE, wrong_gradient(CASE, observed, 2.0, operation=operation))) == {"gradient", law}


def test_the_scenarios_of_a_plan() -> None:
    assert [sorted(laws) for laws in scenarios(FULL_PLAN)] == [
        [],
        ["second-step"],
        ["accumulation"],
        ["accumulation"],
        ["eval"],
        ["eval"],
    ]
    assert scenarios(("eval", "train")) == [{"eval"}, {"eval"}]
    assert scenarios(("accumulate", "eval", "train")) == [
        {"accumulation"},
        {"accumulation", "eval"},
        {"accumulation", "eval"},
    ]
    assert scenarios(("accumulate", "train", "train")) == [{"accumulation"}, {"accumulation"}, {"second-step"}]


def given(**changes: Callable[[Any], Any]) -> Change:
    """Change some fields of an operation."""
    return lambda ours: replace(ours, **{name: change(getattr(ours, name)) for name, change in changes.items()})


TWICE, OTHER_MODE = (
    {"observed": (0, 1, 2, 2)},
    given(called=lambda every: tuple((one, not mode) for one, mode in every)),
)
WRONG: dict[str, tuple[int, Change, set[str], dict[str, object]]] = {
    "a loss": (0, given(losses=lambda all: (*all[:2], all[2] * 1.1)), {"loss"}, {"microbatch": 2, "rank": 0}),
    "no losses": (0, given(losses=lambda _: ()), {"loss"}, {"observed_text": "0 losses"}),
    "an evaluation": (4, given(losses=lambda all: tuple(one + 1 for one in all)), {"loss", "eval"}, {}),
    "the total": (0, given(loss=lambda one: one * 7), {"loss"}, {"microbatch": None}),
    "a call too many": (0, given(called=lambda all: (*all, all[0])), {"microbatches"}, {"what": "calls"}),
    "a mode": (0, OTHER_MODE, {"microbatches"}, {"what": "mode"}),
    "a mode in evaluation": (4, OTHER_MODE, {"microbatches", "eval"}, {"what": "mode"}),
    "a backward too many": (0, given(executed=lambda all: (*all, all[-1])), {"microbatches"}, TWICE),
    "a norm": (0, given(norm=lambda one: one * 1.01), {"grad-norm"}, {"rank": 0}),
    "no norm": (0, given(norm=lambda _: None), {"grad-norm"}, {"rank": 0}),
    "a step": (0, of_slot("parameters", lambda one: one * 1.05), {"updated-parameters"}, {"parameter": SLOT[1]}),
}


def test_a_missing_gradient_fails_presence(observed: Observed) -> None:
    verdict = judge(CASE, altered(observed, of_slot("gradients", lambda _: None)))
    assert "presence" in failing(verdict)
    assert (verdict.mismatches[0].observed_text, verdict.mismatches[0].expected_text) == ("None", "a gradient")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_fails_its_law(observed: Observed, name: str) -> None:
    operation, change, laws, first = WRONG[name]
    verdict = judge(CASE, altered(observed, change, operation=operation))
    assert failing(verdict) == laws
    assert {what: getattr(verdict.mismatches[0], what) for what in first} == first


def test_a_buffer_that_differs_or_is_lost_fails(here: World) -> None:
    case = Case("1f1b", 1, 1, 2, (2,), model="batchnorm", plan=("train",))
    observed = observe(case, here)
    assert judge(case, observed).law("buffers").exact > 0
    buffers = observed.ranks[0][0].buffers or {}
    site = min(buffers)
    for changed in ({**buffers, site: buffers[site] + 1}, {}):
        verdict = judge(case, altered(observed, given(buffers=lambda _, to=changed: to)))
        assert failing(verdict) == {"buffers"}
        assert verdict.mismatches[0].parameter == site[1]


def test_a_parameter_that_nobody_or_somebody_else_holds_fails(observed: Observed) -> None:
    last = len(CASE.plan) - 1

    def moved(ours: RankOperation) -> RankOperation:
        gradients, parameters = dict(ours.gradients or {}), dict(ours.parameters or {})
        for held in (gradients, parameters):
            held[1, SLOT[1]] = held.pop(SLOT)  # type: ignore[assignment]
        return replace(ours, gradients=gradients, parameters=parameters)

    verdict = judge(CASE, altered(observed, moved, operation=last))
    assert "parameters-once" in failing(verdict)
    assert {(m.stage, m.observed_text) for m in verdict.mismatches if m.law == "parameters-once"} == {
        (0, "held 0 times"),
        (1, "held 1 times"),
    }


def changed_model(monkeypatch: pytest.MonkeyPatch, change: Callable[[Model], None]) -> None:
    def changed(case: Case) -> Model:
        model = model_for(case)
        change(model)
        return model

    monkeypatch.setattr("pipeproof.own.judgement.model_for", changed)


def test_nan_in_the_reference_itself_is_unknown(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    def poison(model: Model) -> None:
        with torch.no_grad():
            model.get_parameter(SLOT[1]).fill_(float("nan"))

    changed_model(monkeypatch, poison)
    case = replace(CASE, plan=("train",))
    verdict = judge(case, alone(observed, lambda s: replace(s, losses=(float("nan"),) * 3)))
    assert verdict.law("loss").outcome == "unknown"
    assert verdict.law("loss").reasons == (Reason.NOT_FINITE,)
    golden(verdict.law("loss").note)


def test_two_dead_runs_that_agree_are_unknown(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero gradients on both sides: everything is equal, and nothing was observed."""

    def kill(model: Model) -> None:
        loss = model.mean_loss
        model.mean_loss = lambda output, target: loss(output, target) * 0.0

    changed_model(monkeypatch, kill)

    def dead(ours: RankOperation) -> RankOperation:
        grads: dict[tuple[int, str], Tensor | None] = {
            site: None if g is None else torch.zeros_like(g) for site, g in (ours.gradients or {}).items()
        }
        start = dict(build_model("mlp", layers=2, seed=0).named_parameters())
        parameters = {site: start[site[1]].detach() for site in grads}
        return replace(ours, losses=(0.0,) * 3, loss=0.0, gradients=grads, norm=0.0, parameters=parameters)

    verdict = judge(replace(CASE, plan=("train",)), alone(observed, dead))
    assert verdict.outcome == "unknown"
    assert verdict.law("gradient").reasons == (Reason.NOTHING,)
    golden("\n".join(verdict.law(name).note for name in ("gradient", "updated-parameters")))


@pytest.mark.parametrize(("dtype", "doubtful"), [("bf16", 1.04), ("fp64", 1 + 3e-13)])
def test_other_dtypes_are_judged_bit_for_bit_too(here: World, dtype: str, doubtful: float) -> None:
    case = replace(CASE, dtype=dtype, plan=("train",))
    observed = observe(case, here)
    gradient = observed.gradients(0)[SLOT]
    assert gradient is not None
    assert gradient.dtype is DTYPES[dtype]
    assert judge(case, observed).tier == "bitwise"
    assert judge(case, wrong_gradient(case, observed, doubtful)).outcome == "unknown"
    assert failing(judge(case, wrong_gradient(case, observed, 2.0))) == {"gradient"}


def test_the_tier_below_bitwise_is_named_after_the_dtype(here: World) -> None:
    case = replace(CASE, dtype="bf16", plan=("train",))
    observed = observe(case, here)
    verdict = judge(case, wrong_gradient(case, observed, 1 + 2.0**-7))
    assert (verdict.outcome, verdict.tier) == ("pass", "bf16")
    wide = altered(observed, lambda s: replace(s, gradients=_cast(s.gradients, torch.float32)))
    assert judge(case, wide).law("gradient").exact == 0  # the same numbers in another dtype are not the same bits


def _cast(gradients: Mapping[Site, Tensor | None] | None, dtype: torch.dtype) -> dict[Site, Tensor | None]:
    return {site: gradient if gradient is None else gradient.to(dtype) for site, gradient in (gradients or {}).items()}


def test_an_optimizer_that_nobody_could_see_is_unknown(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that move nothing: parameters agree, and that says nothing."""
    idle = Recipe(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    monkeypatch.setattr("pipeproof.own.judgement.Recipe", lambda **given: replace(idle, **given))

    def still(ours: RankOperation) -> RankOperation:
        start = dict(build_model("mlp", layers=2, seed=0).named_parameters())
        return replace(ours, parameters={site: start[site[1]].detach() for site in ours.parameters or {}})

    verdict = judge(replace(CASE, plan=("train",)), alone(observed, still))
    assert verdict.outcome == "unknown"
    golden(verdict.law("updated-parameters").note)


def test_a_frozen_parameter_that_drifts_by_its_last_place_is_a_failure(here: World) -> None:
    case = replace(CASE, model="frozen", plan=("train",))
    model = build_model("frozen", layers=case.layers, seed=case.seed)
    frozen = next(name for name, parameter in model.named_parameters() if not parameter.requires_grad)

    def drifted(observed: RankOperation) -> RankOperation:
        parameters = {
            site: torch.nextafter(value, value + 1) if site[1] == frozen else value
            for site, value in (observed.parameters or {}).items()
        }
        return replace(observed, parameters=parameters)

    verdict = judge(case, altered(observe(case, here), drifted))
    assert verdict.law("updated-parameters").outcome == "fail"
    assert {m.parameter for m in verdict.mismatches} == {frozen}


def test_steps_that_vanish_are_counted(here: World) -> None:
    case = replace(CASE, dtype="bf16", plan=("train",))
    law = judge(case, observe(case, here)).law("updated-parameters")
    assert law.outcome == "pass"
    golden(law.note)


def test_the_reference_runs_on_one_thread_and_gives_the_others_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


class Known(Oracle):
    """An operation that accumulates, with one loss of 2, and a total of 1."""

    precision = FP32

    def answer(self, number: int, orders: Orders) -> Answer:
        assert not number
        return Answer(Expected("accumulate", (2.0,), 1.0), None, math.inf)


@pytest.mark.parametrize(
    ("every_rank", "total", "outcome"), [(False, 1.0, "pass"), (False, 1.5, "fail"), (True, 1.5, "pass")]
)
def test_who_accumulates_may_report_a_total(every_rank: bool, total: float, outcome: str) -> None:
    """Our own runtime has none then; a user's step may."""
    plan = ("accumulate", "train")
    given = {"laws": LAWS, "unseen": (0,), "uncalled": (0,), "every_rank": every_rank, "results_decide": True}
    required = Requirements(config="c", oracle=Known(), plan=plan, counts=(1, 1), **given)  # type: ignore[arg-type]
    rows = RankOperation(plan[0], (2.0,), (), loss=total), RankOperation(plan[1], (), ())
    ours = Judge(required, Observed(Schedule("", 1, (0,), ((),)), (rows,)))
    crash = ours.judge_observed()
    assert crash is not None or outcome == "fail", "the oracle knows one operation"
    assert [one.outcome for one in ours.ledger.laws() if one.name == "loss"] == [outcome]


def in_bf16() -> nn.Module:
    model: nn.Module = blocks(2, seed=3).bfloat16()
    return model


@pytest.mark.parametrize(("narrow", "outcome"), [("none", "pass"), ("0.", "fail"), ("", "pass")])
def test_sums_in_bf16_beside_sums_in_fp32_fail(whitebox_here: WhiteBox, narrow: str, outcome: str) -> None:
    """Where all are so, they may have been added up in bf16 as they should be, and handed back in fp32."""
    data = [(x.bfloat16(), target) for x, target in pairs(8, rows=8)]
    step = partial(summed_wide, narrow=narrow, given=torch.float32)
    verdict = whitebox_here.validate(step, reference=in_bf16, microbatches=data, ranks=1, loss_fn=loss_fn)
    assert verdict.law("gradient").outcome == outcome, str(verdict)
    assert {one.parameter for one in verdict.mismatches} == ({"0.0.weight"} if outcome == "fail" else set())
