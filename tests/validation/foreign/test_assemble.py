"""What ranks hand back in parts: right parts pass, what makes up no whole is said, the rank that is wrong is named."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pipeproof.core.verdict import Verdict
from pipeproof.foreign import HandedBack, WhiteBox, watch
from tests.support.golden import golden
from tests.support.steps import WIDTH, loss_fn, pairs

Cut = dict[str, Any]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))


def losses_of(model: nn.Module, microbatches: list[Any]) -> list[float]:
    losses = []
    for x, target in microbatches:
        loss = loss_fn(model(x), target)
        (loss / 4).backward()
        losses.append(loss.item())
    return losses


def reduced(model: nn.Module, microbatches: list[Any]) -> tuple[dict[str, Any], list[float]]:
    losses = losses_of(model, microbatches)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return {name: parameter.grad for name, parameter in model.named_parameters()}, losses


def in_rows(model: Any, microbatches: list[Any], *, rows: Any) -> HandedBack:
    """Each rank hands back its ``rows`` of the first weight's gradient."""
    gradients, losses = reduced(model, microbatches)
    whole, own = gradients.pop("0.weight"), rows[dist.get_rank()]
    if own is not None:
        part = torch.cat([whole[one] for one in own]) if isinstance(own, list) else whole[own]
        gradients["0.weight"] = (part, own)
    return HandedBack(gradients, losses)


def judged(whitebox: WhiteBox, step: Any, ranks: Any = None) -> Verdict:
    return whitebox.validate(step, reference=build, microbatches=pairs(4), ranks=ranks or {"dp": 2}, loss_fn=loss_fn)


def every_other(first: int) -> list[slice]:
    """As the rows of queries, keys and values that a rank has of one fused weight."""
    return [slice(k, k + 2) for k in range(first, 12, 4)]


@pytest.mark.parametrize(
    "rows", [(slice(0, 5), slice(5, 12)), (every_other(0), every_other(2)), (slice(None), slice(None))]
)
def test_parts_of_a_gradient_pass(whitebox: WhiteBox, rows: Any) -> None:
    verdict = judged(whitebox, partial(in_rows, rows=rows))
    assert verdict.verdict == "pass", verdict
    assert verdict.law("shards").checked == 1


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ((slice(0, 7), slice(5, 12)), "parts [0:7, 0:8] and [5:12, 0:8] overlap"),
        ((slice(0, 5), slice(7, 12)), "parts [0:5, 0:8], [7:12, 0:8] of [12, 8]: not all of it"),
        ((slice(0, 5), None), "parts [0:5, 0:8] of [12, 8]: not all of it"),
    ],
)
def test_parts_that_make_up_no_whole_are_said_and_nothing_is_blamed(
    whitebox: WhiteBox, rows: Any, sentence: str
) -> None:
    verdict = judged(whitebox, partial(in_rows, rows=rows))
    assert (verdict.verdict, verdict.cause) == ("fail", ())
    cure = "hand back every element once, each with its place in the whole"
    assert verdict.undecided == (f"shards of 0.weight: {sentence}: {cure}",)


def test_a_part_without_its_place_is_no_other_partition(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> HandedBack:
        gradients, losses = reduced(model, microbatches)
        return HandedBack({**gradients, "2.bias": gradients["2.bias"][:3]}, losses)

    verdict = judged(whitebox, step)
    assert (verdict.verdict, verdict.cause) == ("fail", ())
    golden("".join(verdict.undecided), numbers=False)


def test_numbers_that_are_whole_cannot_be_compared(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> HandedBack:
        gradients, losses = reduced(model, microbatches)
        return HandedBack({name: one.long() for name, one in gradients.items()}, losses)

    verdict = judged(whitebox, step)
    assert verdict.verdict == "unknown"
    golden(verdict.details.splitlines()[0].partition(": ")[2])


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_a_rank_whose_shard_is_a_multiple_is_the_one_named(whitebox: WhiteBox, wrong: int) -> None:
    """Shards over two ranks, in two copies: what they are held against may itself be wrong."""

    def step(model: Any, microbatches: list[Any]) -> HandedBack:
        gradients, losses = reduced(model, microbatches)
        rank = dist.get_rank()
        cut = {
            name: slice(rank % 2 * (len(one) // 2), (rank % 2 + 1) * (len(one) // 2)) for name, one in gradients.items()
        }
        times = 0.5 if rank == wrong else 1.0
        return HandedBack({name: (times * one[cut[name]], cut[name]) for name, one in gradients.items()}, losses)

    verdict = judged(whitebox, step, {"dp_replicate": 2, "dp_shard": 2})
    (cause,) = verdict.cause
    assert (cause.kind, cause.rank, cause.factor) == ("scale", wrong, pytest.approx(0.5))
    assert verdict.mismatches[0].rank == wrong
    assert "not-reduced" not in {kind for one in verdict.ruled_out for kind in one.kinds}


def test_zeros_where_no_gradient_is_due_are_no_fault_and_are_said(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any], *, value: float, times: float) -> HandedBack:
        losses = losses_of(model, microbatches)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value) if parameter.grad is None else parameter.grad * times
            dist.all_reduce(parameter.grad)
        return HandedBack(model, losses)

    def validated(value: float, times: float = 1.0) -> Verdict:
        one = partial(step, value=value, times=times)
        return whitebox.validate(one, reference=Idle, microbatches=pairs(4), ranks={"dp": 2}, loss_fn=loss_fn)

    right = validated(0.0)
    assert right.verdict == "pass"
    golden(right.law("presence").note)
    assert [one.kind for one in validated(0.1).cause] == ["unexpected"]
    (cause,) = validated(0.0, times=2.0).cause  # what is wrong elsewhere does not make zeros a fault
    assert (cause.kind, cause.factor) == ("scale", 2.0)


class Idle(nn.Module):
    """A model with a part that nothing goes through, as an expert that no token visits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.busy, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.busy(x)
        return made


def test_of_gradients_by_name_nobody_says_that_no_stage_was_watched(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> HandedBack:
        losses = losses_of(watch(model), microbatches)
        return HandedBack({name: parameter.grad for name, parameter in model.named_parameters()}, losses)

    verdict = judged(whitebox, step, 1)
    assert verdict.verdict == "pass"
    golden(verdict.law("boundaries").note)


def test_a_shard_without_elements_is_no_gradient_that_is_missing(whitebox: WhiteBox) -> None:
    """A parameter without gradient, of whose three rows the fourth rank has none."""

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.used(x)
            return made

    def step(model: Any, microbatches: list[Any]) -> HandedBack:
        fully_shard(model)
        losses = []
        for x, target in microbatches:
            loss = loss_fn(model(x), target)
            loss.backward()  # each rank has one microbatch, and their mean is due
            losses.append(loss.item())
        return HandedBack(model, losses)

    verdict = whitebox.validate(step, reference=Spare, microbatches=pairs(4), ranks={"fsdp": 4}, loss_fn=loss_fn)
    assert verdict.verdict == "pass", verdict


def in_halves(model: Any, microbatches: list[Any], *, fault: str) -> HandedBack:
    """Two replicas, each of which keeps its half of every gradient; the second's is wrong."""
    own, second = [], dist.get_rank() == 1
    losses = []
    for number, (x, target) in enumerate(microbatches):
        loss = loss_fn(model(x), target)
        made = torch.autograd.grad(loss / 4, list(model.parameters()))
        own.append([2 * one if fault == "doubled" and second and number == 1 else one for one in made])
        losses.append(loss.item())
    gradients: dict[str, Any] = {}
    for k, (name, _) in enumerate(model.named_parameters()):
        whole = torch.stack([made[k] for made in own]).sum(dim=0)
        dist.all_reduce(whole)
        if fault == "doubled":
            extra = own[1][k] / 2 if second else torch.zeros_like(whole)
            dist.broadcast(extra, 1)
            whole -= extra * (not second)  # the first half has it once
        half = len(whole) // 2
        rows = slice(half, None) if second else slice(0, half)
        gradients[name] = (-whole[rows] if fault == "sign" and second else whole[rows], rows)
    return HandedBack(gradients, losses)


@pytest.mark.parametrize(("fault", "microbatches"), [("", ()), ("sign", ()), ("doubled", (3,))])
def test_what_is_wrong_with_one_rank_s_shards_is_not_told_of_the_stage(
    whitebox: WhiteBox, fault: str, microbatches: tuple[int, ...]
) -> None:
    verdict = judged(whitebox, partial(in_halves, fault=fault), {"fsdp": 2})
    assert verdict.verdict == ("fail" if fault else "pass"), verdict
    found = [(one.kind, one.rank, one.stage, one.microbatches) for one in verdict.cause]
    assert found == [(fault, 1, 0, microbatches)] * bool(fault)
    assert verdict.cells is None
    assert not {kind for one in verdict.ruled_out for kind in one.kinds}


def test_norms_that_ranks_form_each_for_itself_are_not_told_of_all(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> HandedBack:
        gradients, losses = reduced(model, microbatches)
        own = float(gradients["0.weight" if dist.get_rank() else "2.weight"].norm())
        return HandedBack(gradients, losses, own)

    verdict = judged(whitebox, step)
    assert [one.law for one in verdict.mismatches] == ["grad-norm", "grad-norm"]
    (cause,) = verdict.cause
    assert (cause.kind, cause.rank) == ("norm", 0)
    golden(cause.detail, numbers=False)
