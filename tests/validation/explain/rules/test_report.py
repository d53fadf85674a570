"""Losses and norms of a step that are wrong while its gradients are right: a wrong report, or nothing is known."""

import math
from collections.abc import Callable, Sequence
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
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.loss_scale import LossScale
from pipeproof.explain.rules.report import norm
from pipeproof.reference.step import Expected
from pipeproof.whitebox import WhiteBox
from tests.support import two_ranks
from tests.support.golden import golden
from tests.support.steps import backward, blocks, loss_fn, pairs

COUNT = 4
data = partial(pairs, COUNT, rows=6, width=5, to=3, seed=1)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def judged(
    whitebox: WhiteBox,
    report: Callable[[list[float]], Any],
    *more: Any,
    ranks: Any = 1,
    parts: Callable[[Any], list[nn.Module]] = lambda model: [],
    norm: Callable[[list[float]], float | None] = lambda sizes: None,
    build: Callable[[], nn.Module] = build_model,
) -> Verdict:
    """A right step that makes ``report`` of its losses, and ``norm`` of its parts' norms; of several ranks a sum."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = backward(model, microbatches, divisor=COUNT)
        for parameter in model.parameters() if ranks != 1 else ():
            dist.all_reduce(parameter.grad)
        made = parts(model)
        own = [torch.nn.utils.get_total_norm([p.grad for p in one.parameters()]).item() for one in made or ()]
        return made or model, report(losses), norm(own), *more

    given = data() if build is build_model else pairs()
    return whitebox.validate(step, reference=build, microbatches=given, ranks=ranks, loss_fn=loss_fn)


# What is made of right losses, and whether it is known for a wrong report; of other losses nobody knows whether they
# were computed, as where a term was lost that no gradient comes from.
REPORTS: dict[str, tuple[Callable[[list[float]], Any], str, list[str]]] = {
    "times": (lambda losses: [4 * loss for loss in losses], "fail", ["report"]),
    "reversed": (lambda losses: losses[::-1], "fail", ["report"]),
    "one": (lambda losses: [losses[0]] * COUNT, "fail", ["report"]),
    "sum": (sum, "fail", ["report"]),
    "rounded": (lambda losses: [torch.tensor(loss).half().item() for loss in losses], "fail", ["report"]),
    "more": (lambda losses: [loss + 0.1 for loss in losses], "fail", []),
    "a sum and more": (lambda losses: sum(losses) + 0.1, "fail", []),
    "some a little": (lambda losses: [loss * 1.0003 for loss in losses[:2]] + losses[2:], "fail", []),
    "none": (lambda losses: None, "unknown", []),
    "an empty list": (lambda losses: [], "unknown", []),
}


@pytest.mark.parametrize("title", REPORTS)
def test_what_is_made_of_right_losses_is_a_wrong_report(whitebox_here: WhiteBox, title: str) -> None:
    report, outcome, kinds = REPORTS[title]
    verdict = judged(whitebox_here, report)
    assert (verdict.outcome, [cause.kind for cause in verdict.causes]) == (outcome, kinds)
    assert verdict.law("loss").outcome == outcome
    golden("\n".join([*(cause.detail for cause in verdict.causes), *verdict.undecided]) or "nothing", numbers=False)


@pytest.mark.sweep
def test_a_loss_that_was_added_up_over_the_ranks_is_a_wrong_report(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        stage = two_ranks.half(model)
        losses = two_ranks.all_forward_all_backward(stage, microbatches)
        return stage, None if losses is None else 2 * sum(losses) / two_ranks.COUNT

    (cause,) = two_ranks.judged(whitebox, step, two_ranks.plain).causes
    assert (cause.kind, cause.rank) == ("report", 1)
    golden(cause.detail, numbers=False)


def test_the_mean_of_a_replica_is_told_from_that_of_all(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, lambda losses: sum(losses) / len(losses), ranks=[0, 1])
    assert {m.law for m in verdict.mismatches} == {"loss"}
    (cause,) = verdict.causes
    told = "each replica reports the mean of its own microbatches; as one number the whole step's is expected"
    assert (cause.kind, told in cause.detail) == ("report", True)


@pytest.mark.parametrize("said", [(0, 0), (0, 1, 2), (0, 1, 2, 3, 3)], ids=["one twice", "one missing", "one more"])
def test_an_order_that_the_step_hands_back_says_nothing_of_gradients(
    whitebox_here: WhiteBox, said: tuple[int, ...]
) -> None:
    verdict = judged(whitebox_here, list, [f"0{kind}{m}" for kind in "FB" for m in said])
    (cause,) = verdict.causes
    assert (cause.kind, cause.rank, cause.stage) == ("order", 0, 0), str(verdict)
    assert f"forward of {list(said)}" in cause.detail


@pytest.mark.parametrize(("cut", "place"), [((4,), "everywhere"), ((2, 4), "rank 0, stage 1")], ids=["one", "two"])
def test_of_the_only_stage_nothing_is_said_as_a_place(
    whitebox_here: WhiteBox, cut: tuple[int, ...], place: str
) -> None:
    """The last stage's gradients are counted twice."""
    verdict = judged(
        whitebox_here,
        list,
        parts=lambda model: [model[start:end] for start, end in zip((0, *cut), cut, strict=False)],
        norm=lambda sizes: math.hypot(*sizes, sizes[-1]),
        build=blocks,
    )
    (cause,) = verdict.causes
    assert (cause.kind, cause.place) == ("norm", place), str(verdict)
    golden(cause.detail, numbers=False)


def of_one_rank(*times: float, norms: Sequence[float | None] = (5.0, 3.0), **more: Any) -> Evidence:
    """Rank 1 reports 3 in place of 5, and its weights moved so many ``times`` as far; all are clipped to 1."""
    size = Size((9,), 1.0, 1.0)
    moved = [
        Mismatch("updated-parameters", 1, Size((9,), k, 1.0, k, 1.0), size, "tensor", 1, 1, parameter=f"{n}")
        for n, k in enumerate(times)
    ]
    wrong = [
        Mismatch("grad-norm", 1, one, 5.0, "number", rank=k) for k, one in enumerate(norms) if one not in (None, 5.0)
    ]
    sizes = {(0, "first"): 4.0, (1, "0"): math.sqrt(4.5), (1, "1"): math.sqrt(4.5)}
    right: Any = SimpleNamespace(
        weights={"0": torch.ones(9), "1": torch.ones(9)}, expected=Expected("train", (0.0,) * 2, 0.0, norm=5.0)
    )
    verdict = Verdict("a step", "fail", "none", (), (*wrong, *moved))
    known = {"right": right, "clipped_to": 1.0, "lengths": sizes} | more
    return Evidence(verdict, (0, 1), 2, 2, gradients=dict.fromkeys(sizes), norms=norms, **known)


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


@pytest.mark.parametrize(("times", "kinds"), [(1024.0, ["norm"]), (512.0, [])])
def test_a_norm_of_scaled_gradients_is_named(times: float, kinds: list[str]) -> None:
    known = of_one_rank(norms=[5.0 * times] * 2, scale=LossScale(1024.0, 1024.0))
    assert [cause.kind for cause in norm(known)] == kinds


@pytest.mark.parametrize(("others", "ranks"), [([], ()), ([5.0], (0, 1)), ([None], ())])
def test_ranks_that_each_report_a_norm_of_their_own_are_all_named(
    others: list[float | None], ranks: tuple[int, ...]
) -> None:
    own = [Cause("norm", rank=0, detail="a"), Cause("norm", rank=1, detail="b"), Cause("norm", rank=1, detail="c")]
    for first in ([], [Cause("norm", detail="all")]):
        members: Any = SimpleNamespace(norm_causes=lambda first=first: [*first, *own])
        (cause,) = norm(of_one_rank(norms=[4.0, 3.0, *others], members=members))
        expected = Cause("norm", ranks=ranks, detail="rank 0: a; rank 1: b")
        assert cause == (first or [expected])[0]
