"""Losses and norms of a step that are wrong while its gradients are right: a wrong report, or nothing is known."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.core.cause import Cause
from pipeproof.core.mismatch import Mismatch, Size
from pipeproof.core.verdict import Verdict
from pipeproof.explain.loss_scale import LossScale
from pipeproof.explain.rules.report import norm
from pipeproof.whitebox import WhiteBox
from tests.support import two_ranks
from tests.support.golden import golden
from tests.support.steps import blocks, loss_fn, pairs

COUNT = 4


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


data = partial(pairs, COUNT, rows=6, width=5, to=3, seed=1)


def replicated(model: Any, microbatches: list[Any]) -> Any:
    """A right step of a replica, which reports the mean of its own losses."""
    losses = []
    for x, target in microbatches:
        loss = loss_fn(model(x), target)
        (loss / COUNT).backward()
        losses.append(loss.item())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return model, sum(losses) / len(losses)


def judged(whitebox: WhiteBox, report: Callable[[list[float]], Any]) -> Verdict:
    """A right step that makes ``report`` of its losses."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = []
        for x, target in microbatches:
            loss = loss_fn(model(x), target)
            (loss / COUNT).backward()
            losses.append(loss.item())
        return model, report(losses)

    return whitebox.validate(step, reference=build_model, microbatches=data(), ranks=1, loss_fn=loss_fn)


@pytest.mark.parametrize(
    "report",
    [
        lambda losses: [4 * loss for loss in losses],
        lambda losses: losses[::-1],
        lambda losses: [losses[0]] * COUNT,
        sum,
        lambda losses: [torch.tensor(loss).half().item() for loss in losses],
    ],
)
def test_what_is_made_of_right_losses_is_a_wrong_report(
    whitebox_here: WhiteBox, report: Callable[[list[float]], Any]
) -> None:
    verdict = judged(whitebox_here, report)
    (cause,) = verdict.causes
    assert cause.kind == "report"
    golden(cause.detail, numbers=False)


@pytest.mark.parametrize(
    "report",
    [
        lambda losses: [loss + 0.1 for loss in losses],
        lambda losses: sum(losses) + 0.1,
        lambda losses: [loss * 1.0003 for loss in losses[:2]] + losses[2:],
    ],
)
def test_of_other_losses_nobody_knows_whether_they_were_computed(
    whitebox_here: WhiteBox, report: Callable[[list[float]], Any]
) -> None:
    """As where a term was lost that no gradient comes from."""
    verdict = judged(whitebox_here, report)
    assert (verdict.outcome, verdict.causes) == ("fail", ())
    golden(verdict.undecided[0], numbers=False)


@pytest.mark.sweep
def test_a_loss_that_was_added_up_over_the_ranks_is_a_wrong_report(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        stage = two_ranks.half(model)
        losses = two_ranks.all_forward_all_backward(stage, microbatches)
        return stage, None if losses is None else 2 * sum(losses) / two_ranks.COUNT

    (cause,) = two_ranks.judged(whitebox, step, two_ranks.plain).causes
    assert (cause.kind, cause.rank) == ("report", 1)
    golden(cause.detail, numbers=False)


@pytest.mark.parametrize("none", [None, []])
def test_a_step_without_losses_does_not_pass(whitebox_here: WhiteBox, none: Any) -> None:
    verdict = judged(whitebox_here, lambda losses: none)
    assert (verdict.outcome, verdict.law("loss").outcome) == ("unknown", "unknown")


def test_the_mean_of_a_replica_is_told_from_that_of_all(whitebox: WhiteBox) -> None:
    verdict = whitebox.validate(replicated, reference=build_model, microbatches=data(), ranks=[0, 1], loss_fn=loss_fn)
    assert {m.law for m in verdict.mismatches} == {"loss"}
    (cause,) = verdict.causes
    told = "each replica reports the mean of its own microbatches; as one number the whole step's is expected"
    assert (cause.kind, told in cause.detail) == ("report", True)


@pytest.mark.parametrize("said", [(0, 0), (0, 1, 2), (0, 1, 2, 3, 3)], ids=["one twice", "one missing", "one more"])
def test_an_order_that_the_step_hands_back_says_nothing_of_gradients(
    whitebox_here: WhiteBox, said: tuple[int, ...]
) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = [loss_fn(model(x), target) for x, target in microbatches]
        (torch.stack(losses).sum() / COUNT).backward()
        return model, [loss.item() for loss in losses], None, [f"0{kind}{m}" for kind in "FB" for m in said]

    verdict = whitebox_here.validate(step, reference=build_model, microbatches=data(), ranks=1, loss_fn=loss_fn)
    (cause,) = verdict.causes
    assert (cause.kind, cause.rank, cause.stage) == ("order", 0, 0), str(verdict)
    assert f"forward of {list(said)}" in cause.detail


@pytest.mark.parametrize(("stages", "place"), [(1, "everywhere"), (2, "rank 0, stage 1")])
def test_of_the_only_stage_nothing_is_said_as_a_place(whitebox_here: WhiteBox, stages: int, place: str) -> None:
    """The last stage's gradients are counted twice."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = [loss_fn(model(x), target) for x, target in microbatches]
        (torch.stack(losses).sum() / len(losses)).backward()
        parts = [model] if stages == 1 else [model[:2], model[2:]]
        sizes = [nn.utils.get_total_norm([p.grad for p in part.parameters()]).item() for part in parts]
        return parts, [loss.item() for loss in losses], math.hypot(*sizes, sizes[-1])

    verdict = whitebox_here.validate(step, reference=blocks, microbatches=pairs(), ranks=1, loss_fn=loss_fn)
    (cause,) = verdict.causes
    assert (cause.kind, cause.place) == ("norm", place), str(verdict)
    golden(cause.detail, numbers=False)


def of_one_rank(*times: float) -> Any:
    """Rank 1 reports 3 in place of 5, and its weights moved so many ``times`` as far; all are clipped to 1."""
    moved = [
        Mismatch(
            "updated-parameters", 1, Size((9,), k, 1.0, k, 1.0), Size((9,), 1.0, 1.0), "tensor", 1, 1, parameter=f"{n}"
        )
        for n, k in enumerate(times)
    ]
    mismatches = [Mismatch("grad-norm", 1, 3.0, 5.0, "number", rank=1), *moved]
    sizes = {(0, "first"): 4.0, (1, "0"): math.sqrt(4.5), (1, "1"): math.sqrt(4.5)}
    return SimpleNamespace(
        verdict=SimpleNamespace(mismatches=mismatches),
        differs=lambda law: any(one.law == law for one in mismatches),
        members=None,
        playable=None,
        sums=None,
        norms=[5.0, 3.0],
        expected=SimpleNamespace(norm=5.0),
        max_norm=1.0,
        gradients=dict.fromkeys(sizes),
        sizes=sizes,
        placement=(0, 1),
        stages=2,
        ranks=2,
        microbatches=2,
        scale=None,
        run=None,
        number=0,
        right=SimpleNamespace(weights={"0": torch.ones(9), "1": torch.ones(9)}),
        holders=lambda stage: [stage],
    )


@pytest.mark.parametrize(
    ("times", "kind", "said"),
    [
        ((5 / 3, 5 / 3), "norm", "gradients were clipped by it"),
        ((5 / 3, 2.0), "norm", "that of rank 1's gradients alone"),
        ((), "report", "that of rank 1's gradients alone"),
    ],
)
def test_a_norm_that_weights_were_clipped_by_is_more_than_a_report(
    times: tuple[float, ...], kind: str, said: str
) -> None:
    (cause,) = norm(of_one_rank(*times))
    assert (cause.kind, cause.rank) == (kind, 1)
    assert said in cause.detail


@pytest.mark.parametrize(("times", "kind"), [(1024.0, "norm"), (512.0, "")])
def test_a_norm_of_scaled_gradients_is_named(times: float, kind: str) -> None:
    facts = of_one_rank()
    facts.scale, facts.norms = LossScale(1024.0, 1024.0), [5.0 * times] * 2
    facts.verdict.mismatches[:] = [Mismatch("grad-norm", 1, 5.0 * times, 5.0, "number", rank=rank) for rank in range(2)]
    assert [cause.kind for cause in norm(facts)] == ([kind] if kind else [])


@pytest.mark.parametrize(("others", "ranks"), [([], ()), ([5.0], (0, 1)), ([None], ())])
def test_ranks_that_each_report_a_norm_of_their_own_are_all_named(
    others: list[float | None], ranks: tuple[int, ...]
) -> None:
    facts = of_one_rank()
    own = [Cause("norm", rank=0, detail="a"), Cause("norm", rank=1, detail="b"), Cause("norm", rank=1, detail="c")]
    facts.norms, facts.members = [4.0, 3.0, *others], SimpleNamespace(norm_causes=lambda: own)
    (cause,) = norm(facts)
    assert (cause.rank, cause.ranks, cause.detail.split("; ")) == (None, ranks, ["rank 0: a", "rank 1: b"])
    facts.members = SimpleNamespace(norm_causes=lambda: [Cause("norm", detail="all"), *own])
    assert norm(facts) == [Cause("norm", detail="all")]
