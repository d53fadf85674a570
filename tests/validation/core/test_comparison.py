"""What is infinite or no number is never a pass, whichever way it is judged, and hides nothing."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.comparison import Comparison, ExpectedOperation
from pipeproof.core.ledger import Heading, Ledger
from pipeproof.core.limits import FP32
from pipeproof.core.observe.observed import Observed
from pipeproof.core.reason import Reason
from pipeproof.core.tolerance import Floor, error
from pipeproof.core.verdict import Mismatch, Verdict
from pipeproof.own.case import Case
from pipeproof.own.judgement import judge
from pipeproof.own.observe import observe
from pipeproof.pipeline import PipelineSchedule
from pipeproof.records.case_record import record_expected
from pipeproof.records.compare import compare
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.composed.rounding import Unmeasured
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.two_ranks import (
    COUNT,
    Call,
    all_forward_all_backward,
    called,
    half,
    judged,
    loss_fn,
    model_of,
    named,
    passes,
    plain,
    plain_block,
    step,
    without_second,
)

CASE = Case("1f1b", 2, 1, 2, (1, 1), model="mlp", plan=("train",))
NOT_FINITE = [math.nan, math.inf, -math.inf]
mse = nn.functional.mse_loss
DATA = [(torch.full((1, 2), float(k + 1)), torch.zeros(1, 2)) for k in range(2)]


@pytest.fixture(scope="module")
def observed(world: World) -> Observed:
    return observe(CASE, world)


def on_rank(observed: Observed, rank: int, **fields: Any) -> Observed:
    rows = [list(row) for row in observed.ranks]
    rows[rank][0] = replace(rows[rank][0], **fields)
    return replace(observed, ranks=tuple(map(tuple, rows)))


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("field", "law"), [("loss", "loss"), ("norm", "grad-norm")])
def test_a_number_that_one_rank_reports_is_compared_also_where_it_is_none(
    observed: Observed, field: str, law: str, rank: int, value: float
) -> None:
    verdict = judge(CASE, on_rank(observed, rank, **{field: value}))
    assert [law.name for law in verdict.laws if law.outcome == "fail"] == [law]
    (mismatch,) = verdict.mismatches
    assert (mismatch.rank, mismatch.observed_text) == (rank, f"{value:.9g}")


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("field", ["gradients", "parameters"])
def test_one_element_that_is_no_number_fails(observed: Observed, field: str, value: float) -> None:
    tensors = dict(getattr(observed.ranks[0][0], field))
    site = min(tensors)
    tensors[site] = tensors[site].clone()
    tensors[site].view(-1)[0] = value
    assert judge(CASE, on_rank(observed, 0, **{field: tensors})).outcome == "fail"


@pytest.mark.parametrize("value", NOT_FINITE)
def test_the_loss_of_a_foreign_step_is_compared_also_where_it_is_none(whitebox_here: WhiteBox, value: float) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        (sum((mse(model(x), target) for x, target in microbatches), torch.zeros(())) / 2).backward()
        return model, value

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(2, 2)

    verdict = whitebox_here.validate(step, reference=build, microbatches=DATA, ranks=1, loss_fn=mse)
    assert (verdict.outcome, verdict.law("loss").outcome) == ("fail", "fail"), str(verdict)


class Rooted(nn.Module):
    """Its loss is finite, and the gradient of one weight is no number: the root of nothing has no slope."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.root = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found + torch.sqrt(self.root * 0.0) * 0.0


def rooted() -> nn.Module:
    torch.manual_seed(0)
    return Rooted()


def test_a_gradient_without_a_number_in_the_reference_is_not_compared_and_that_is_said(whitebox_here: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        losses = [mse(model(x), target) for x, target in microbatches]
        (torch.stack(losses).sum() / 2).backward()
        return model, [loss.item() for loss in losses]

    verdicts = [whitebox_here.validate(step, reference=rooted, microbatches=DATA, ranks=1, loss_fn=mse)]
    for against in (record_step(rooted(), DATA, loss_fn=mse), SingleDevice(rooted, mse)):
        model = rooted()
        with check_step(model, DATA, against=against) as check:
            result = step(model, DATA)
            check.gradients()
            check.report(losses=result[1])
        verdicts.append(check.verdict)
    for verdict in verdicts:
        law = verdict.law("gradient")
        assert (verdict.outcome, law.outcome, law.left_out) == ("unknown", "unknown", ("root",)), str(verdict)
        assert "1 not compared" in str(law)
        assert law.reasons == (Reason.NOT_FINITE,)


class Emptied(nn.Module):
    """One of its parameters has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found + self.empty.sum()


def test_a_gradient_without_elements_hides_nothing(whitebox_here: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        (sum((loss_fn(model(x), target) for x, target in microbatches), torch.zeros(())) / 2).backward()
        return model

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Emptied()

    verdict = whitebox_here.validate(step, reference=build, microbatches=DATA, ranks=1, loss_fn=loss_fn)
    assert verdict.law("gradient").outcome == "pass", str(verdict)


RECORD = record_expected(CASE)


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(("field", "law"), [("norm", "grad-norm"), ("loss", "loss")])
def test_a_record_that_expects_no_number_proves_nothing(field: str, law: str, value: float) -> None:
    same = replace(RECORD, operations=(replace(RECORD.operations[0], **{field: value}),))
    verdict = compare(same, same)
    assert (verdict.outcome, verdict.law(law).outcome) == ("unknown", "unknown")
    golden(verdict.law(law).note)
    assert compare(RECORD, same).law(law).outcome == "fail"


def test_a_mask_of_infinities_hides_nothing_and_is_no_difference() -> None:
    mask = torch.tensor([-math.inf, 1.0, math.nan, 2.0])
    assert error(mask.clone(), mask) == 0
    assert error(mask * (1 + 2**-20), mask) == pytest.approx(2**-20)
    assert error(torch.tensor([math.inf, 1.0, math.nan, 2.0]), mask) == math.inf
    assert error(torch.tensor([0.0, 1.0, math.nan, 2.0]), mask) == math.inf


@pytest.mark.parametrize(("before", "outcome"), [(math.nan, "unknown"), (-math.inf, "pass")])
def test_an_update_to_no_number_is_no_fault_of_an_optimizer(before: float, outcome: str) -> None:
    was, observed = torch.tensor([before, 1.0]), torch.tensor([before, 2.0])
    book = Ledger(["updated-parameters"])
    tensors = {"before": {"w": was}, "gradients": {"w": torch.ones(2)}, "parameters": {"w": observed.clone()}}
    expected = ExpectedOperation("train", (), (), **tensors)
    Comparison(expected, Unmeasured(FP32), book).parameter("w", observed if before < 0 else -observed)
    assert [law.outcome for law in book.laws()] == [outcome]
    assert not book.mismatches


def test_equal_mismatches_are_equal_also_where_they_are_about_no_number() -> None:
    one, two = (Mismatch("loss", 1, float("nan"), 1.0, "number") for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != replace(two, rank=1)
    assert isinstance(Verdict("c", "fail", "none", (), (one,)).as_dict()["mismatches"], list)


def test_what_nobody_compared_makes_a_law_unknown_and_is_counted() -> None:
    book = Ledger(["gradient"])
    book.hold(Heading("gradient", frozenset(), Mismatch("gradient", 1, parameter="a")), True, "", "")
    assert book.compared_names("gradient", 0) == {"a"}
    book.leave_out("gradient", [f"p{k}" for k in range(14)], "not compared")
    (law,) = book.laws()
    assert (law.outcome, len(law.left_out)) == ("unknown", 14)
    assert "14 not compared" in str(law)
    golden(law.note)


def test_gradients_that_a_job_does_not_show_are_no_pass() -> None:
    plain = nn.Linear(2, 2)
    record = record_step(plain, DATA, loss_fn=mse)
    with check_step(plain, DATA, against=record) as check:
        losses = []
        for x, target in DATA:
            loss = mse(plain(x), target)
            (loss / 2).backward()
            losses.append(loss.item())
        check.gradients({"weight": plain.weight.grad})
        check.report(losses=losses)
    law = check.verdict.law("gradient")
    assert (check.verdict.outcome, law.checked, law.left_out) == ("unknown", 1, ("bias",))


@pytest.mark.parametrize(("order", "outcome"), [([0, 1], "pass"), ([1, 0], "fail"), ([0, 0], "fail")])
def test_losses_come_in_the_order_of_what_was_given(order: list[int], outcome: str) -> None:
    plain = nn.Linear(2, 2)
    record = record_step(plain, DATA, loss_fn=mse)
    with check_step(plain, DATA, against=record) as check:
        losses = []
        for x, target in DATA:
            loss = mse(plain(x), target)
            (loss / 2).backward()
            losses.append(loss.item())
        check.gradients()
        check.report(losses=[losses[place] for place in order])
    assert check.verdict.law("loss").outcome == outcome, str(check.verdict)
    assert check.verdict.law("gradient").outcome == "pass"


@pytest.mark.parametrize(
    ("reported", "total", "wrong"),
    [
        ([1.0, 2.0], 1.5, ()),
        ([1.0, 2.0], 1.6, (None,)),
        ([1.0, 4.0], 2.5, (1,)),  # the total of what was reported: the loss alone is wrong
        ([1.0, 4.0], 1.5, (1, None)),  # what the reference has is not nearer: it is no total of these
        (None, 1.5, ()),  # of losses that nobody reported it is the reference's
        (None, 2.5, (None,)),
        ([-2.0, 1.0], -0.5, (0, 1)),
    ],
)
def test_a_total_is_that_of_the_losses_that_were_reported(
    reported: list[float] | None, total: float, wrong: tuple[int | None, ...]
) -> None:
    ledger = Ledger(["loss"])
    at = Comparison(ExpectedOperation("train", ("", ""), (1.0, 2.0), 1.5), Unmeasured(FP32), ledger)
    if reported is not None:
        at.losses(reported)
    at.loss(total)
    assert tuple(one.microbatch for one in ledger.mismatches) == wrong


def test_a_total_beside_the_losses_of_a_share_is_that_of_all() -> None:
    ledger = Ledger(["loss"])
    at = Comparison(ExpectedOperation("train", ("", ""), (1.0, 2.0), 1.5), Unmeasured(FP32), ledger)
    at.losses([2.0], share=[1])
    at.loss(1.5)
    at.loss(2.0)
    assert [one.observed for one in ledger.mismatches] == [2.0]


def test_floors_that_are_no_number_excuse_nothing() -> None:
    for floor in (Floor(math.nan, 0.0, 0.0), Floor(0.0, math.nan, 0.0)):
        assert floor.outcome(1.0) == "fail"


def by_forward(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    result: Tensor = stage.forward(x)
    return result


def by_parts(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    assert isinstance(stage, nn.Sequential)
    for part in stage:
        x = part(x)
    return x


def now_and_then(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    return by_forward(stage, microbatch, x) if microbatch % 2 else called(stage, microbatch, x)


def on_one_rank(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    return (by_forward if dist.get_rank() else called)(stage, microbatch, x)


@pytest.mark.parametrize("call", [by_forward, by_parts])
def test_a_watched_stage_without_calls_decides_nothing(whitebox: WhiteBox, call: Call) -> None:
    verdict = passes(judged(whitebox, partial(step, call=call), plain))
    for law in ("microbatches", "boundaries"):
        assert verdict.law(law).outcome == "not observed"
        golden(verdict.law(law).note)


@pytest.mark.sweep
@pytest.mark.parametrize(("call", "law"), [(on_one_rank, "boundaries"), (now_and_then, "microbatches")])
def test_calls_of_one_rank_or_of_some_microbatches_decide_nothing(whitebox: WhiteBox, call: Call, law: str) -> None:
    golden(passes(judged(whitebox, partial(step, call=call), plain)).law(law).note)


@pytest.mark.parametrize("call", [by_forward, now_and_then, called])
def test_a_dropped_microbatch_is_named_however_a_stage_is_called(whitebox: WhiteBox, call: Call) -> None:
    found = named(judged(whitebox, partial(step, call=partial(without_second, call=call)), plain))
    assert found[0] == ("dropped", 0, 0, (2,)), found


# First stages that are not trained.


def by_own_schedule(model: nn.Sequential, microbatches: list[Any]) -> Any:
    stage = watch(half(model))
    schedule = PipelineSchedule(
        kind="1F1B", n_microbatches=COUNT, stages=[stage], loss_fn=loss_fn, pp_group=dist.group.WORLD
    )
    known = schedule.accumulate(microbatches)
    return stage, [known[m] for m in sorted(known)] or None


@pytest.mark.parametrize("frozen", [1, 2, 3])
@pytest.mark.parametrize("one", [step, by_own_schedule])
def test_a_frozen_stage_owes_no_backward(whitebox: WhiteBox, one: Callable[..., Any], frozen: int) -> None:
    passes(judged(whitebox, one, partial(plain, frozen=frozen)))


@pytest.mark.sweep
def test_faults_behind_a_frozen_stage_are_named(whitebox: WhiteBox) -> None:
    def dropped(stage: nn.Module, m: int, x: Tensor) -> Tensor:
        result = called(stage, m, x)
        return result.detach().requires_grad_() if m == 2 and dist.get_rank() == 1 else result

    def thawed(model: nn.Sequential, microbatches: list[Any]) -> Any:
        return step(model.requires_grad_(True), microbatches)

    build = partial(plain, frozen=2)
    assert named(judged(whitebox, partial(step, call=dropped), build))[0] == ("dropped", 1, 1, (2,))
    assert {kind for kind, *_ in named(judged(whitebox, thawed, build))} == {"unexpected"}


# Modes and calls that change nothing that was computed.


in_evaluation_mode = partial(step, training=False)


def with_metric(model: nn.Sequential, microbatches: list[Any], *, first: bool = False) -> Any:
    """Rank 0 calls its stage twice more, without any backward."""
    stage, again = watch(half(model)), [x for x, _ in microbatches[1:3]] if dist.get_rank() == 0 else []
    before = [stage(x) for x in again if first]
    losses = all_forward_all_backward(stage, microbatches)
    assert len(before) + len([stage(x) for x in again if not first]) == len(again)
    return stage, losses


@pytest.mark.sweep
@pytest.mark.parametrize("one", [in_evaluation_mode, with_metric, partial(with_metric, first=True)])
def test_a_mode_or_a_call_that_changes_nothing_is_no_fault(whitebox: WhiteBox, one: Callable[..., Any]) -> None:
    passes(judged(whitebox, one, plain))


class Fades(nn.Module):
    """Another computation in evaluation mode, by what is no dropout of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.9 if self.training else x


def test_a_mode_that_changes_what_is_computed_is_named(whitebox: WhiteBox) -> None:
    found = judged(whitebox, in_evaluation_mode, partial(model_of, lambda: nn.Sequential(plain_block(), Fades())))
    assert named(found)[0][0] == "mode"


@pytest.mark.sweep
def test_a_mode_that_changes_nothing_is_not_blamed_for_another_fault(whitebox: WhiteBox) -> None:
    both = partial(in_evaluation_mode, passed=lambda m, gradient: gradient / 2 if m == 1 else gradient)
    assert named(judged(whitebox, both, plain)) == [("scale", 0, 0, (1,))]
