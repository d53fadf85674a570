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
from pipeproof.core.comparison import Allowed, Comparison, ExpectedOperation
from pipeproof.core.ledger import Ledger
from pipeproof.core.observe.observed import Observed
from pipeproof.core.reason import Reason
from pipeproof.core.tolerance import error
from pipeproof.core.verdict import Mismatch, Verdict
from pipeproof.own.case import Case
from pipeproof.own.judgement import judge
from pipeproof.own.observe import observe
from pipeproof.pipeline import PipelineSchedule
from pipeproof.records.case_record import record_expected
from pipeproof.records.compare import compare
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_record import record_step
from pipeproof.whitebox import WhiteBox
from pipeproof.worlds.world import World
from tests.support.check_here import check_here, show_all
from tests.support.golden import golden
from tests.support.steps import backward
from tests.support.two_ranks import (
    COUNT,
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


class Linear(nn.Module):
    """A layer, and another parameter: whose gradient is no number, for the root of nothing has no slope; or empty."""

    def __init__(self, other: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        self.root = nn.Parameter(torch.ones(2)) if other == "root" else None
        self.empty = nn.Parameter(torch.zeros(0)) if other == "empty" else None

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        found = found if self.root is None else found + torch.sqrt(self.root * 0.0) * 0.0
        return found if self.empty is None else found + self.empty.sum()


ROOTED = partial(Linear, "root")


def trained(model: nn.Module, microbatches: list[Any], *, reported: float | None = None) -> Any:
    losses = backward(model, microbatches, by=mse)
    return model, losses if reported is None else reported


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_foreign_loss_is_compared_also_where_it_is_none(whitebox_here: WhiteBox, value: float) -> None:
    step = partial(trained, reported=value)
    verdict = whitebox_here.validate(step, reference=Linear, microbatches=DATA, ranks=1, loss_fn=mse)
    assert (verdict.outcome, verdict.law("loss").outcome) == ("fail", "fail"), str(verdict)


@pytest.mark.parametrize("how", ["whitebox", "record", "model"])
def test_an_expected_gradient_without_a_number_is_left_out(whitebox_here: WhiteBox, how: str) -> None:
    if how == "whitebox":
        verdict = whitebox_here.validate(trained, reference=ROOTED, microbatches=DATA, ranks=1, loss_fn=mse)
    else:
        record = record_step(ROOTED(), DATA, loss_fn=mse) if how == "record" else SingleDevice(ROOTED, mse)
        verdict = check_here(ROOTED(), DATA, record)
    law = verdict.law("gradient")
    assert (verdict.outcome, law.outcome, law.left_out) == ("unknown", "unknown", ("root",)), str(verdict)
    assert "1 not compared" in str(law)
    assert law.reasons == (Reason.NOT_FINITE,)


def test_a_gradient_without_elements_hides_nothing(whitebox_here: WhiteBox) -> None:
    reference = partial(Linear, "empty")
    verdict = whitebox_here.validate(trained, reference=reference, microbatches=DATA, ranks=1, loss_fn=mse)
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


ONES, UP = torch.ones(3), torch.nextafter(torch.ones(3), torch.tensor(2.0))


@pytest.mark.parametrize(
    ("before", "gradient", "wanted", "observed", "outcome"),
    [
        ([math.nan, 1.0], ONES[:2], [math.nan, 2.0], [math.nan, -2.0], "unknown"),  # no fault of an optimizer
        ([-math.inf, 1.0], ONES[:2], [-math.inf, 2.0], [-math.inf, 2.0], "pass"),
        (ONES, ONES, ONES, UP, "unknown"),  # storage may round what moves
        (ONES, 0 * ONES, UP, torch.nextafter(UP, 2 * UP), "unknown"),
        (ONES, 0 * ONES, ONES, UP, "fail"),  # and nothing that stands still
        (ONES, None, ONES, UP, "fail"),
    ],
)
def test_an_update_is_wrong_beyond_what_storage_rounds(
    before: Any, gradient: Tensor | None, wanted: Any, observed: Any, outcome: str
) -> None:
    book = Ledger(["updated-parameters"])
    before, wanted, observed = map(torch.as_tensor, (before, wanted, observed))
    tensors = {"before": {"w": before}, "gradients": {"w": gradient}, "parameters": {"w": wanted}}
    Comparison(ExpectedOperation("train", (), (), **tensors), Allowed(), book).parameter("w", observed)
    assert ([law.outcome for law in book.laws()], bool(book.mismatches)) == ([outcome], outcome == "fail")


def test_equal_mismatches_are_equal_also_where_they_are_about_no_number() -> None:
    one, two = (Mismatch("loss", 1, float("nan"), 1.0, "number") for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != replace(two, rank=1)
    assert isinstance(Verdict("c", "fail", "none", (), (one,)).as_dict()["mismatches"], list)


def test_what_nobody_compared_makes_a_law_unknown_and_is_counted() -> None:
    book = Ledger(["gradient"])
    book.hold(Mismatch("gradient", 1, parameter="a"), True, "", "")
    assert book.compared_names("gradient", 0) == {"a"}
    book.leave_out("gradient", [f"p{k}" for k in range(14)], "not compared")
    (law,) = book.laws()
    assert (law.outcome, len(law.left_out)) == ("unknown", 14)
    assert "14 not compared" in str(law)
    golden(law.note)


def test_gradients_that_a_job_does_not_show_are_no_pass() -> None:
    plain = nn.Linear(2, 2)

    def show_weight(check: Any, losses: list[float]) -> None:
        check.gradients({"weight": plain.weight.grad})
        check.report(losses=losses)

    verdict = check_here(plain, DATA, record_step(plain, DATA, loss_fn=mse), finish=show_weight)
    law = verdict.law("gradient")
    assert (verdict.outcome, law.checked, law.left_out) == ("unknown", 1, ("bias",))


@pytest.mark.parametrize(("order", "outcome"), [([0, 1], "pass"), ([1, 0], "fail"), ([0, 0], "fail")])
def test_losses_come_in_the_order_of_what_was_given(order: list[int], outcome: str) -> None:
    def reorder(check: Any, losses: list[float]) -> None:
        show_all(check, [losses[place] for place in order])

    plain = nn.Linear(2, 2)
    verdict = check_here(plain, DATA, record_step(plain, DATA, loss_fn=mse), finish=reorder)
    assert (verdict.law("loss").outcome, verdict.law("gradient").outcome) == (outcome, "pass"), str(verdict)


@pytest.mark.parametrize(
    ("reported", "share", "total", "wrong"),
    [
        ([1.0, 2.0], None, 1.5, ()),
        ([1.0, 2.0], None, 1.6, (None,)),
        ([1.0, 4.0], None, 2.5, (1,)),  # the total of what was reported: the loss alone is wrong
        ([1.0, 4.0], None, 1.5, (1, None)),  # what the reference has is not nearer: it is no total of these
        (None, None, 1.5, ()),  # of losses that nobody reported it is the reference's
        (None, None, 2.5, (None,)),
        ([-2.0, 1.0], None, -0.5, (0, 1)),
        ([2.0], [1], 1.5, ()),  # beside the losses of a share it is that of all
        ([2.0], [1], 2.0, (None,)),
    ],
)
def test_a_total_is_that_of_the_losses_that_were_reported(
    reported: list[float] | None, share: list[int] | None, total: float, wrong: tuple[int | None, ...]
) -> None:
    ledger = Ledger(["loss"])
    at = Comparison(ExpectedOperation("train", ("", ""), (1.0, 2.0), 1.5), Allowed(), ledger)
    if reported is not None:
        at.losses(reported, share=share)
    at.loss(total)
    assert tuple(one.microbatch for one in ledger.mismatches) == wrong


def by_forward(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    return stage.forward(x)


def by_parts(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    assert isinstance(stage, nn.Sequential)
    for part in stage:
        x = part(x)
    return x


def now_and_then(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    return by_forward(stage, microbatch, x) if microbatch % 2 else called(stage, microbatch, x)


def on_one_rank(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    return (by_forward if dist.get_rank() else called)(stage, microbatch, x)


def by_own_schedule(model: nn.Sequential, microbatches: list[Any]) -> Any:
    stage = watch(half(model))
    schedule = PipelineSchedule(
        kind="1F1B", n_microbatches=COUNT, stages=[stage], loss_fn=loss_fn, pp_group=dist.group.WORLD
    )
    known = schedule.accumulate(microbatches)
    return stage, [known[m] for m in sorted(known)] or None


in_evaluation_mode = partial(step, training=False)


def with_metric(model: nn.Sequential, microbatches: list[Any], *, first: bool = False) -> Any:
    """Rank 0 calls its stage twice more, without any backward."""
    stage, again = watch(half(model)), [x for x, _ in microbatches[1:3]] if dist.get_rank() == 0 else []
    before = [stage(x) for x in again if first]
    losses = all_forward_all_backward(stage, microbatches)
    assert len(before) + len([stage(x) for x in again if not first]) == len(again)
    return stage, losses


class Fades(nn.Module):
    """Another computation in evaluation mode, by what is no dropout of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.9 if self.training else x


def dropped(stage: nn.Module, m: int, x: Tensor) -> Tensor:
    result = called(stage, m, x)
    return result.detach().requires_grad_() if m == 2 and dist.get_rank() == 1 else result


def thawed(model: nn.Sequential, microbatches: list[Any]) -> Any:
    return step(model.requires_grad_(True), microbatches)


def frozen(count: int) -> Callable[[], nn.Sequential]:
    return partial(plain, frozen=count)


fading = partial(model_of, lambda: nn.Sequential(plain_block(), Fades()))
scaled = partial(in_evaluation_mode, passed=lambda m, gradient: gradient / 2 if m == 1 else gradient)
sweep = partial(pytest.param, marks=pytest.mark.sweep)
row = pytest.param
NOT_OBSERVED = {"microbatches": "not observed", "boundaries": "not observed"}
FIRST_LACKS = {("dropped", 0, 0, (2,))}


@pytest.mark.parametrize(
    ("one", "build", "laws", "causes"),
    [
        row(partial(step, call=by_forward), plain, NOT_OBSERVED, {}, id="no call"),
        row(partial(step, call=by_parts), plain, NOT_OBSERVED, {}, id="calls of parts"),
        sweep(partial(step, call=on_one_rank), plain, {"boundaries": "pass"}, {}, id="calls of one rank"),
        sweep(partial(step, call=now_and_then), plain, {"microbatches": "pass"}, {}, id="calls of some microbatches"),
        *(row(step, frozen(k), {}, {}, id=f"frozen {k}") for k in (1, 2, 3)),
        *(row(by_own_schedule, frozen(k), {}, {}, id=f"frozen {k} in a schedule") for k in (1, 2, 3)),
        sweep(in_evaluation_mode, plain, {}, {}, id="evaluation mode"),
        sweep(with_metric, plain, {}, {}, id="more calls last"),
        sweep(partial(with_metric, first=True), plain, {}, {}, id="more calls first"),
        *(
            row(partial(step, call=partial(without_second, call=call)), plain, {}, FIRST_LACKS, id=f"lacks one, {name}")
            for name, call in (("no call", by_forward), ("some calls", now_and_then), ("all calls", called))
        ),
        row(partial(step, call=dropped), frozen(2), {}, {("dropped", 1, 1, (2,))}, id="behind a frozen stage"),
        row(thawed, frozen(2), {}, {("unexpected",)}, id="thawed"),
        row(in_evaluation_mode, fading, {}, {("mode",)}, id="a mode that counts"),
        row(scaled, plain, {}, {("scale", 0, 0, (1,))}, id="a mode that does not"),
    ],
)
def test_results_decide_and_name_what_is_wrong(
    whitebox: WhiteBox, one: Callable[..., Any], build: Any, laws: dict[str, str], causes: set[tuple[object, ...]]
) -> None:
    verdict = judged(whitebox, one, build)
    if causes:
        assert {cause[: max(map(len, causes))] for cause in named(verdict)} == causes
    else:
        passes(verdict)
    for law, outcome in laws.items():
        assert verdict.law(law).outcome == outcome
        golden(verdict.law(law).note)
