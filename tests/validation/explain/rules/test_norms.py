"""Norms that are others of the same gradients: where the mistake is said to be."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof.core.cause import Cause
from pipeproof.core.mismatch import Mismatch, Size
from pipeproof.explain.loss_scale import LossScale
from pipeproof.explain.rules.norms import norm
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import blocks, loss_fn, pairs


@pytest.fixture
def whitebox(whitebox_here: WhiteBox) -> WhiteBox:
    """One rank is enough."""
    return whitebox_here


@pytest.mark.parametrize(("stages", "place"), [(1, "everywhere"), (2, "rank 0, stage 1")])
def test_of_the_only_stage_nothing_is_said_as_a_place(whitebox: WhiteBox, stages: int, place: str) -> None:
    """The last stage's gradients are counted twice."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = [loss_fn(model(x), target) for x, target in microbatches]
        (torch.stack(losses).sum() / len(losses)).backward()
        parts = [model] if stages == 1 else [model[:2], model[2:]]
        sizes = [nn.utils.get_total_norm([p.grad for p in part.parameters()]).item() for part in parts]
        return parts, [loss.item() for loss in losses], math.hypot(*sizes, sizes[-1])

    verdict = whitebox.validate(step, reference=blocks, microbatches=pairs(), ranks=1, loss_fn=loss_fn)
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
        gradients={},
        sizes=sizes,
        placement=(0, 1),
        stages=2,
        ranks=2,
        microbatches=2,
        scale=None,
        run=None,
        number=0,
        right=SimpleNamespace(weights={"0": torch.ones(9), "1": torch.ones(9)}),
        held_sites=lambda rank: {site for site in sizes if site[0] == rank},
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
