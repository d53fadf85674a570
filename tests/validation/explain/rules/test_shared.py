"""Replicas that were reduced in part: which parameters, or which microbatches came too late, is told."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.cause import Cause
from pipeproof.core.mismatch import Size
from pipeproof.core.observe.shards import Shard
from pipeproof.core.replicas import Replicas
from pipeproof.core.verdict import Mismatch, Verdict
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.members import Members
from pipeproof.explain.rules.shared import explain_shared
from pipeproof.reference.step import Contribution, Expected
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.matching import Local
from pipeproof.whitebox.rank import ModulePart
from pipeproof.whitebox.stages_in_order import PlacedStage
from tests.support.golden import golden
from tests.support.steps import backward, loss_fn, pairs
from tests.support.sweeps import some

COUNT = 6
data = partial(pairs, COUNT, rows=6, width=5, to=3, seed=1)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def judged(
    whitebox: WhiteBox,
    *,
    left: str = "",
    before: int = COUNT // 2,
    divisor: int = 2,
    times: float = 1.0,
    spoil: Callable[[Any], object] = lambda model: None,
) -> Verdict:
    """Two replicas that take the mean of all gradients but for ``left``, before the microbatch ``before`` of each."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = []
        for m, (x, target) in enumerate([*microbatches, (None, None)]):
            for name, p in model.named_parameters() if m == before else ():
                if name != left:
                    dist.all_reduce(p.grad)
                    p.grad /= divisor
            if m < len(microbatches):
                loss = times * loss_fn(model(x), target)
                (loss / len(microbatches)).backward()
                losses.append(loss.item())
        spoil(model)
        return model, losses

    return whitebox.validate(step, reference=build_model, microbatches=data(), ranks=[0, 1], loss_fn=loss_fn)


def noisy(model: Any) -> None:
    model[0].weight.grad += dist.get_rank() * 1e-2 * torch.randn(8, 5)


def halved_on_one(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad /= 1 + dist.get_rank()


# How two replicas are reduced, the outcome, and each cause's kind, rank, stage, parameter and factor.
JOBS: dict[str, tuple[dict[str, Any], str, list[tuple[Any, ...]]]] = {
    "in time": ({}, "pass", []),
    "not one": ({"left": "0.weight"}, "fail", [("not-reduced", None, 0, "0.weight", None)]),
    "not another": ({"left": "2.bias"}, "fail", [("not-reduced", None, 0, "2.bias", None)]),
    "before the last": ({"before": 2}, "fail", [("not-reduced", None, 0, None, None)]),
    "noise on one": ({"spoil": noisy}, "fail", []),
    "halved on one": ({"spoil": halved_on_one}, "fail", [("scale", 1, 0, None, 0.5)]),
    "a sum": ({"divisor": 1}, "fail", [("scale", None, 0, None, 2.0)]),
    "losses are too large": ({"times": 2.0}, "fail", [("scale", None, 0, None, 2.0)]),
}


@pytest.mark.parametrize("title", some(JOBS, ["in time", "noise on one", "losses are too large"]))
def test_how_replicas_were_reduced(whitebox: WhiteBox, title: str) -> None:
    options, outcome, expected = JOBS[title]
    verdict = judged(whitebox, **options)
    found = [(cause.kind, cause.rank, cause.stage, cause.parameter, cause.factor) for cause in verdict.causes]
    assert (verdict.outcome, found) == (outcome, expected), str(verdict)
    if expected:
        golden(verdict.causes[0].detail, numbers=False)
    if title == "halved on one":  # whose gradients are wrong
        assert (verdict.law("gradient").outcome, verdict.mismatches[0].rank) == ("unknown", 1)


def test_every_stage_that_was_not_reduced_is_told(whitebox: WhiteBox) -> None:
    """Every rank runs the whole model, and hands back its own half."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = backward(model, microbatches, divisor=COUNT)
        return model[:2] if dist.get_rank() < 2 else model[2:], losses

    options: dict[str, Any] = {"microbatches": data(), "ranks": [0, 1, 0, 1], "loss_fn": loss_fn}
    causes = whitebox.validate(step, reference=build_model, **options).causes
    assert [(cause.kind, cause.stage) for cause in causes] == [("not-reduced", 0), ("not-reduced", 1)]


DRAW = torch.Generator().manual_seed(0)
NAMES = ("a.w", "b.w", "c.w")
EACH = {name: [torch.randn(32, generator=DRAW) for _ in range(4)] for name in NAMES}
RIGHT = {name: torch.stack(parts).sum(dim=0) for name, parts in EACH.items()}
UPPER, LOWER = Shard(((0, 16),)), Shard(((16, 32),))
TWO, ONE, FOUR = Replicas((0, 1), 4), Replicas((0, 0), 4), Replicas((0, 1, 2, 3), 4)
UPDATE: Any = SimpleNamespace(
    now=SimpleNamespace(batches=[SimpleNamespace(tokens=8)] * 4, microbatches=4, stages=1),
    replicas=2,
    stages=1,
    ranks=1,
    placement=(0,),
    shared=frozenset(),
)
EXPECTED = Expected("train", (0.0,) * 4, 0.0, gradients={(0, name): expected for name, expected in RIGHT.items()})


def differing(
    replicas: Replicas, *ranks: Mapping[str, Tensor], shards: Sequence[Shard] = (), used: Sequence[str] = ()
) -> Evidence:
    """Each rank has gradients of ``NAMES``, right where none is given; with ``shards``, a part of each.

    ``used``: in which order the reference uses them.
    """
    lying = [dict.fromkeys(range(len(NAMES)), shard) for shard in shards] or [{} for _ in ranks]
    parts = [
        ModulePart(tuple(map(Local, NAMES)), tuple(given.get(name, RIGHT[name]) for name in NAMES), shards=own)
        for given, own in zip(ranks, lying, strict=True)
    ]
    merged = ModulePart(parts[0].locals, parts[0].gradients, members=tuple(enumerate(parts)))
    contributions = [Contribution(0.0, {(0, name): EACH[name][m] for name in NAMES}) for m in range(4)]
    members = Members(
        [PlacedStage(0, 0, merged, dict(enumerate(NAMES)), {})], replicas, lambda: contributions, [None] * len(ranks)
    )
    right = [{k: RIGHT[name] if not own else own[k].of(RIGHT[name]) for k, name in enumerate(NAMES)} for own in lying]
    wrong = [
        name
        for k, name in enumerate(NAMES)
        if any(not torch.equal(part.gradients[k], own[k]) for part, own in zip(parts, right, strict=True))
    ]
    law = "gradient" if shards and len({*shards}) == len(ranks) else "replicas"
    size = Size((32,), 1.0, 1.0)
    mismatches = tuple(Mismatch(law, 1, size, size, "tensor", 0, 0, parameter=name) for name in wrong)
    expected: Any = SimpleNamespace(expected=EXPECTED, update=UPDATE)
    beside: Any = SimpleNamespace(modules={name: k for k, name in enumerate(used, start=1)}) if used else None
    verdict = Verdict("a step", "fail", "none", (), mismatches=mismatches)
    known: dict[str, Any] = {"right": expected, "beside": beside, "members": members}
    return Evidence(verdict, (0,), 4, len(ranks), gradients={}, norms=(None,) * len(ranks), **known)


def share(name: str, *microbatches: int) -> Tensor:
    return torch.stack([EACH[name][m] for m in microbatches]).sum(dim=0)


def lines(causes: Sequence[Cause]) -> list[str]:
    return [f"{cause.kind} {cause}" for cause in causes]


KEEP = "ranks 0, 1 each keep their own part"
PARTS = {name: torch.randn(32, generator=DRAW) for name in NAMES}
REST = {name: RIGHT[name] - PARTS[name] for name in NAMES}
ALONE = [{name: share(name, *some) for name in NAMES} for some in ((0, 2), (1, 3))]
HALVES = [{name: where.of(expected) for name, expected in RIGHT.items()} for where in (UPPER, LOWER)]
A, B = NAMES[:2]


LAST_ALONE = {name: [share(name, 0, 1, 2, 2), share(name, 0, 1, 3, 3)] for name in (A, B)}  # means of the first alone
EACH_LACKS = "rank 0 lacks microbatches 1, 3; rank 1 lacks microbatches 0, 2"


@pytest.mark.parametrize(
    ("replicas", "ranks", "expected"),
    [
        (TWO, [RIGHT, RIGHT], []),
        (TWO, ALONE, [f"not-reduced stage 0: {EACH_LACKS}"]),
        (ONE, ALONE, [f"not-reduced stage 0: {EACH_LACKS}"]),
        (
            TWO,
            [{B: share(B, 0, 2)}, {}],
            [f"not-reduced rank 0, stage 0, parameter {B}: rank 0 lacks microbatches 1, 3"],
        ),
        (
            TWO,
            [{name: each[rank] for name, each in LAST_ALONE.items()} for rank in (0, 1)],
            [f"not-reduced stage 0, parameter {A}: rank 0 lacks microbatch 3; rank 1 lacks microbatch 2; also: {B}"],
        ),
        (ONE, [PARTS, REST], [f"not-reduced stage 0: {KEEP}: the sum of these is expected"]),
        (
            ONE,
            [{name: 2 * part for name, part in one.items()} for one in (PARTS, REST)],
            [f"not-reduced stage 0: {KEEP}: the mean of these is expected"],
        ),
        (ONE, [PARTS, {}], []),
        (ONE, [{name: 0 * expected for name, expected in RIGHT.items()}, {}], ["zero rank 0, stage 0"]),
        (TWO, [{A: -RIGHT[A]}, {}], [f"sign rank 0, stage 0, parameter {A}"]),
        (TWO, [{A: RIGHT[A] + PARTS[A]}, {}], []),
    ],
)
def test_what_copies_are_made_of_rank_by_rank(
    replicas: Replicas, ranks: Sequence[Mapping[str, Tensor]], expected: list[str]
) -> None:
    assert lines(explain_shared(differing(replicas, *ranks))) == expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (HALVES, []),
        ([{A: HALVES[0][A] / 4}, {}], [f"scale rank 0, stage 0, parameter {A}: 1/4 = 1 / the number of microbatches"]),
        (
            HALVES[::-1],
            [f"misplaced rank {k}, stage 0: it is the part that rank {1 - k} should have" for k in (0, 1)],
        ),
    ],
)
def test_what_shards_are_made_of_rank_by_rank(ranks: Sequence[Mapping[str, Tensor]], expected: list[str]) -> None:
    halves = [half | given for half, given in zip(HALVES, ranks, strict=True)]
    assert lines(explain_shared(differing(TWO, *halves, shards=(UPPER, LOWER)))) == expected


def test_shards_that_have_the_microbatches_of_some_ranks() -> None:
    places = [(some, where) for some in ((0, 1), (2, 3)) for where in (UPPER, LOWER)]
    halves = [{name: where.of(share(name, *some)) for name in NAMES} for some, where in places]
    (cause,) = explain_shared(differing(FOUR, *halves, shards=(UPPER, LOWER) * 2))
    assert (cause.kind, cause.stage, cause.parameter) == ("not-reduced", 0, None)
    golden(cause.detail)


@pytest.mark.parametrize(("used", "expected"), [(("a", "b"), B), (("b", "a"), None), ((), None)])
def test_parts_of_a_sum_and_what_else_is_wrong(used: tuple[str, ...], expected: str | None) -> None:
    """What is wrong of a parameter used before may follow; one used after is wrong for another reason."""
    evidence = differing(ONE, {A: RIGHT[A] + 1, B: PARTS[B]}, {A: RIGHT[A] - 2, B: REST[B]}, used=used)
    assert [cause.parameter for cause in explain_shared(evidence)] == [expected] * (expected is not None)


@pytest.mark.parametrize(
    ("names", "stages", "wheres"),
    [(NAMES, 2, [0, 1]), (NAMES, 1, [0]), ([A], 2, [0])],
    ids=["all of the first of two", "all there is", "some of a stage"],
)
def test_parts_in_all_of_a_stage_may_be_what_the_next_handed_back(
    names: Sequence[str], stages: int, wheres: Sequence[int]
) -> None:
    each = [{name: parts[name] for name in names} for parts in (PARTS, REST)]
    evidence = replace(differing(ONE, *each), placement=(0,) * stages)
    (cause,) = explain_shared(evidence)
    assert [one.stage for one in (cause, *cause.instead)] == wheres
