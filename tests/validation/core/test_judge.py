"""The judge, on values: what was produced is altered by hand, and the right law must say so."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
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


@cache
def run_of(case: Case, here: World) -> Observed:
    return observe(case, here)


@pytest.fixture
def observed(here: World) -> Observed:
    return run_of(CASE, here)


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
    model = model_for(case)
    found = altered(observed, of_slot("gradients", lambda one: one * factor), operation=operation)
    reference = Reference(model, owner=owners(model, case.split), recipe=Recipe())
    for number in (k for k in range(operation + 1) if case.plan[k] == "train"):
        gradients = found.gradients(number)
        norm = reference.norm(gradients)
        parameters = reference.step(gradients, clip_factor(norm, max_norm_of(case, number)))
    return altered(found, lambda ours: replace(ours, norm=norm, parameters=parameters), operation=operation)


def failing(verdict: Verdict) -> set[str]:
    return {law.name for law in verdict.laws if law.outcome == "fail"}


def test_what_was_produced_passes_bit_for_bit_and_every_law_was_exercised(here: World) -> None:
    verdict = judge(CASE, run_of(CASE, here), measure=True)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise")
    assert [law.name for law in verdict.laws] == list(LAWS)
    assert {law.name: law.outcome for law in verdict.laws} == {
        name: "not applicable" if name in ("tied-copies", "buffers") else "pass" for name in LAWS
    }
    assert all(law.exact == law.checked > 0 for law in verdict.laws if law.outcome == "pass")
    assert 1e-8 < verdict.floor < 1e-5
    assert judge(BATCHNORM, run_of(BATCHNORM, here)).law("buffers").exact > 0


@pytest.mark.parametrize(
    ("dtype", "operation", "factor", "outcome", "tier"),
    [
        ("fp32", 0, 1 + 2**-22, "pass", "fp32"),
        ("bf16", 0, 1 + 2.0**-7, "pass", "bf16"),
        ("fp32", 0, 1.00005, "unknown", "none"),
        ("bf16", 0, 1.04, "unknown", "none"),
        ("fp64", 0, 1 + 3e-13, "unknown", "none"),
        *(("fp32", 0, factor, "fail", "none") for factor in (0.0, -1.0, 2.0, 1 / 3)),
        *((dtype, 0, 2.0, "fail", "none") for dtype in ("bf16", "fp64")),
        *(("fp32", operation, 2.0, "fail", "none") for operation in (1, 3, 5)),
    ],
)
def test_a_gradient_that_is_off_fails_its_law_and_its_scenario(
    here: World, dtype: str, operation: int, factor: float, outcome: str, tier: str
) -> None:
    case = CASE if dtype == "fp32" else replace(CASE, dtype=dtype, plan=("train",))
    verdict = judge(case, wrong_gradient(case, run_of(case, here), factor, operation=operation))
    assert (verdict.outcome, verdict.tier) == (outcome, tier)
    assert verdict.law("gradient").worst == pytest.approx(abs(factor - 1), rel=0.3), "up to what dtypes round"
    law = {1: {"second-step"}, 3: {"accumulation"}, 5: {"eval"}}.get(operation, set())
    assert failing(verdict) == ({"gradient"} | law if outcome == "fail" else set())
    assert [(m.law, m.parameter, m.rank, m.stage, m.operation) for m in verdict.mismatches] == [
        ("gradient", SLOT[1], 0, 0, operation + 1)
    ] * (outcome != "pass")


def test_later_scenarios_are_not_judged_after_a_disagreement(observed: Observed) -> None:
    verdict = judge(CASE, wrong_gradient(CASE, observed, 2.0, operation=1))
    assert failing(verdict) == {"gradient", "second-step"}
    assert verdict.mismatches[0].operation == 2
    assert verdict.law("eval").outcome == verdict.law("accumulation").outcome == "unknown"
    assert verdict.law("eval").reasons == (Reason.EARLIER,)
    golden(verdict.law("eval").note)


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


def at_another_stage(ours: RankOperation) -> RankOperation:
    gradients, parameters = dict[Site, Any](ours.gradients or {}), dict[Site, Any](ours.parameters or {})
    for held in (gradients, parameters):
        held[1, SLOT[1]] = held.pop(SLOT)
    return replace(ours, gradients=gradients, parameters=parameters)


BATCHNORM = Case("1f1b", 1, 1, 2, (2,), model="batchnorm", plan=("train",))
FROZEN, UP = replace(CASE, model="frozen", plan=("train",)), lambda one: torch.nextafter(one, one + 1)
LAST = len(CASE.plan) - 1
TWICE, EXTRA = {"observed": (0, 1, 2, 2)}, given(gradients=lambda all: {**all, (0, "extra"): torch.ones(2)})
OTHER_MODE = given(called=lambda every: tuple((one, not mode) for one, mode in every))
OFF = given(buffers=lambda all: {**all, min(all): all[min(all)] + 1})
WITHOUT = {"presence", "grad-norm", "updated-parameters"}
ONCE = {"parameters-once"}  # it is about no operation
WRONG: dict[str, tuple[Case, int, Change, set[str], dict[str, object]]] = {
    "a loss": (CASE, 0, given(losses=lambda all: (*all[:2], all[2] * 1.1)), {"loss"}, {"microbatch": 2, "rank": 0}),
    "no losses": (CASE, 0, given(losses=lambda _: ()), {"loss"}, {"observed_text": "0 losses"}),
    "an evaluation": (CASE, 4, given(losses=lambda all: tuple(one + 1 for one in all)), {"loss", "eval"}, {}),
    "the total": (CASE, 0, given(loss=lambda one: one * 7), {"loss"}, {"microbatch": None}),
    "a call too many": (CASE, 0, given(called=lambda all: (*all, all[0])), {"microbatches"}, {"what": "calls"}),
    "a mode": (CASE, 0, OTHER_MODE, {"microbatches"}, {"what": "mode"}),
    "a mode in evaluation": (CASE, 4, OTHER_MODE, {"microbatches", "eval"}, {"what": "mode"}),
    "a backward too many": (CASE, 0, given(executed=lambda all: (*all, all[-1])), {"microbatches"}, TWICE),
    "a norm": (CASE, 0, given(norm=lambda one: one * 1.01), {"grad-norm"}, {"rank": 0}),
    "no norm": (CASE, 0, given(norm=lambda _: None), {"grad-norm"}, {"rank": 0}),
    "no gradient": (CASE, 0, of_slot("gradients", lambda _: None), WITHOUT, {"observed_text": "None"}),
    "a step": (CASE, 0, of_slot("parameters", lambda one: one * 1.05), {"updated-parameters"}, {"parameter": SLOT[1]}),
    "a step of what is frozen": (FROZEN, 0, of_slot("parameters", UP), {"updated-parameters"}, {"parameter": SLOT[1]}),
    "a buffer": (BATCHNORM, 0, OFF, {"buffers"}, {"what": "tensor"}),
    "no buffer": (BATCHNORM, 0, given(buffers=lambda _: {}), {"buffers"}, {"observed_text": "no such buffer"}),
    "another stage": (CASE, LAST, at_another_stage, ONCE, {"stage": 0, "observed_text": "held 0 times"}),
    "a parameter of no model": (CASE, LAST, EXTRA, ONCE, {"parameter": "extra", "what": "held"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_fails_its_law(here: World, name: str) -> None:
    case, operation, change, laws, first = WRONG[name]
    verdict = judge(case, altered(run_of(case, here), change, operation=operation))
    assert failing(verdict) == laws
    assert {what: getattr(verdict.mismatches[0], what) for what in first} == first


def poisoned(case: Case) -> Model:
    model = model_for(case)
    with torch.no_grad():
        model.get_parameter(SLOT[1]).fill_(math.nan)
    return model


def killed(case: Case) -> Model:
    model = model_for(case)
    loss = model.mean_loss
    model.mean_loss = lambda output, target: loss(output, target) * 0.0
    return model


def still(ours: RankOperation) -> RankOperation:
    start = dict(build_model("mlp", layers=2, seed=0).named_parameters())
    return replace(ours, parameters={site: start[site[1]].detach() for site in ours.parameters or {}})


def dead(ours: RankOperation) -> RankOperation:
    """Zero gradients, as in the reference: everything is equal, and nothing was observed."""
    gradients = {site: None if one is None else torch.zeros_like(one) for site, one in (ours.gradients or {}).items()}
    return replace(still(ours), losses=(0.0,) * 3, loss=0.0, gradients=gradients, norm=0.0)


def idle(**given: Any) -> Recipe:
    return Recipe(**given | {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0)})


@pytest.mark.parametrize(
    ("name", "instead", "change", "laws", "reason"),
    [
        ("model_for", poisoned, given(losses=lambda _: (math.nan,) * 3), ("loss",), Reason.NOT_FINITE),
        ("model_for", killed, dead, ("gradient", "updated-parameters"), Reason.NOTHING),
        ("Recipe", idle, still, ("updated-parameters",), Reason.ROUNDING),
    ],
    ids=["no number in the reference", "two dead runs", "steps that move nothing"],
)
def test_what_agrees_and_shows_nothing_is_unknown(
    observed: Observed,
    name: str,
    instead: Callable[..., Any],
    change: Change,
    laws: tuple[str, ...],
    reason: Reason,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"pipeproof.own.judgement.{name}", instead)
    verdict = judge(replace(CASE, plan=("train",)), alone(observed, change))
    found = [verdict.law(law) for law in laws]
    assert verdict.outcome == "unknown"
    assert {(one.outcome, *one.reasons) for one in found} == {("unknown", reason)}
    golden("\n".join(one.note for one in found))


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_other_dtypes_are_judged_bit_for_bit_too(here: World, dtype: str) -> None:
    case = replace(CASE, dtype=dtype, plan=("train",))
    observed = run_of(case, here)
    assert observed.gradients(0)[SLOT].dtype is DTYPES[dtype]
    assert judge(case, observed).tier == "bitwise"
    wide = altered(observed, lambda s: replace(s, gradients=_cast(s.gradients, torch.float32)))
    assert judge(case, wide).law("gradient").exact == 0  # the same numbers in another dtype are not the same bits


def _cast(gradients: Mapping[Site, Tensor | None] | None, dtype: torch.dtype) -> dict[Site, Tensor | None]:
    return {site: gradient if gradient is None else gradient.to(dtype) for site, gradient in (gradients or {}).items()}


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
    ("foreign", "total", "outcome"), [(True, 1.0, "pass"), (True, 1.5, "fail"), (False, 1.5, "pass")]
)
def test_who_accumulates_may_report_a_total(foreign: bool, total: float, outcome: str) -> None:
    """Our own runtime has none then; a user's step may."""
    plan = ("accumulate", "train")
    given = {"laws": LAWS, "unseen": (0,), "uncalled": (0,), "foreign": foreign}
    required = Requirements(config="c", oracle=Known(), plan=plan, counts=(1, 1), **given)  # type: ignore[arg-type]
    rows = RankOperation(plan[0], (2.0,), (), loss=total), RankOperation(plan[1], (), ())
    ours = Judge(required, Observed(Schedule("", 1, (0,), ((),)), (rows,)))
    crash = ours.judge_observed()
    assert crash is not None or outcome == "fail", "the oracle knows one operation"
    assert [one.outcome for one in ours.ledger.laws() if one.name == "loss"] == [outcome]


def in_bf16() -> nn.Module:
    return blocks(2, seed=3).bfloat16()


@pytest.mark.parametrize(("narrow", "outcome"), [("none", "pass"), ("0.", "fail"), ("", "pass")])
def test_sums_in_bf16_beside_sums_in_fp32_fail(whitebox_here: WhiteBox, narrow: str, outcome: str) -> None:
    """Where all are so, they may have been added up in bf16 as they should be, and handed back in fp32."""
    data = [(x.bfloat16(), target) for x, target in pairs(8, rows=8)]
    step = partial(summed_wide, narrow=narrow, given=torch.float32)
    verdict = whitebox_here.validate(step, reference=in_bf16, microbatches=data, ranks=1, loss_fn=loss_fn)
    assert verdict.law("gradient").outcome == outcome, str(verdict)
    assert {one.parameter for one in verdict.mismatches} == ({"0.0.weight"} if outcome == "fail" else set())
