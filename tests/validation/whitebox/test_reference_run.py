"""The reference's own run over a task's microbatches."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.observe.sketch import Sketch, digest_of_values, sketch
from pipeproof.core.replicas import Replicas
from pipeproof.reference.step import Recipe, Reference, Site
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.reference_run import ReferenceRun, SecondModel
from pipeproof.whitebox.task import ReferenceRaised, Task
from pipeproof.whitebox.tensor_index import Places
from tests.support.steps import WIDTH, loss_fn
from tests.support.two_ranks import all_forward_all_backward, data, half, model_of

MICROBATCHES = 3


class Tied(nn.Module):
    """Two uses of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.first(x).tanh())
        return made


def build() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def task_of(*, wrong: int | None = None) -> Task:
    """A task; microbatch ``wrong`` fits no model."""
    draw = torch.Generator().manual_seed(1)
    pairs = [
        (torch.randn(2, 5 if number == wrong else 4, generator=draw), torch.randn(2, 4, generator=draw))
        for number in range(MICROBATCHES)
    ]
    return Task(lambda model, data: None, build, tuple(pairs), nn.functional.mse_loss, None)


def run_of(task: Task) -> ReferenceRun:
    return ReferenceRun(task, task.build("cpu"), Replicas((0, 0), MICROBATCHES))


def expected(task: Task, owner: Mapping[str, int]) -> list[Mapping[Site, Tensor | None]]:
    model = task.build("cpu")
    reference = Reference(model, owner=owner, recipe=Recipe(loss=task.loss))
    return [one.gradients for one in reference.contribute(task.batches(model))]


def equal(one: Mapping[Site, Tensor | None], two: Mapping[Site, Tensor | None]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[site], two[site]) for site in one)  # type: ignore[arg-type]


APART = {"first.weight": 4, "last.weight": 1}
TOGETHER = {"first.weight": 0, "last.weight": 0}


@pytest.mark.parametrize(("owner", "ahead_holds"), [(APART, True), (TOGETHER, False)], ids=["apart", "together"])
def test_stages_that_are_told_late_get_the_same(owner: dict[str, int], ahead_holds: bool) -> None:
    task = task_of()
    ahead = run_of(task)
    next(ahead)  # a part of it while the ranks are busy
    run = ahead.settle(owner, watched=True)
    assert (run is ahead) == ahead_holds
    made = run.contributions(owner)
    assert len(made) == MICROBATCHES
    for one, wanted in zip(made, expected(task, owner), strict=True):
        assert equal(one.gradients, wanted)
    assert run.places is not None
    for way in run.places:
        assert len(way["output 0 of last"]) == MICROBATCHES


@pytest.mark.parametrize("begun", [True, False])
def test_an_unwatched_run_keeps_nothing(begun: bool) -> None:
    ahead = run_of(task_of())
    for _ in range(begun):
        next(ahead)
    run = ahead.settle(APART, watched=False)
    assert ((run is ahead), run.places) == (begun, None)
    assert len(run.contributions(APART)) == MICROBATCHES


@pytest.mark.parametrize("ahead", [True, False], ids=["before the ranks end", "after"])
def test_sketches_are_gathered_only_of_what_nobody_has(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    made: list[Sketch] = []

    def counted(tensor: Tensor) -> Sketch:
        made.append(sketch(tensor))
        return made[-1]

    monkeypatch.setattr("pipeproof.whitebox.tensor_index.sketch", counted)
    task, place = task_of(), "output 0 of last"
    begun = run_of(task)
    if ahead:
        next(begun)
    run = begun.settle(APART, watched=True)
    run.contributions(APART)
    assert run.places is not None
    assert made == []
    forward, backward = run.places
    model = task.build("cpu")
    observed = [sketch(model(batch.inputs[0])) for batch in task.batches(model)]
    assert forward.recognise(observed)
    assert [*forward[place].values()] == observed
    assert made == [], "what was observed is what passes: that is known by its content"
    assert not forward.recognise([sketch(torch.ones(2, 4))])
    gathered = backward[place]
    assert len(made) == len({*made}) == MICROBATCHES * 5, "an input, two outputs and their gradients"
    assert [one.digest for one in gathered.values()] == [
        one.digest for one in made if any(at == place for at, _ in backward.holding(one))
    ]


def test_only_what_may_be_kept_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bytes] = []

    def counted(tensor: Tensor) -> bytes:
        looked.append(digest_of_values(tensor))
        return looked[-1]

    monkeypatch.setattr("pipeproof.whitebox.tensor_index.digest_of_values", counted)
    places, kept = Places(gather=lambda: None), [torch.full((3,), float(k)) for k in range(4)]
    for number, one in enumerate(kept):
        places.keep("layer", number, one)
    observed = [sketch(one) for one in kept]
    assert places.recognise(observed[1:2])
    assert looked == [observed[1].digest]
    assert list(places.find(observed[1])) == [("layer", 1)]
    assert looked == [observed[1].digest], "nothing else can be that"
    assert list(places.find(observed[3])) == [("layer", 3)]
    assert sorted(looked) == sorted(one.digest for one in observed), "any may be what is new"


def test_what_the_reference_raises_is_kept() -> None:
    task = task_of(wrong=1)
    ahead = run_of(task)
    assert len(list(ahead)) == 2, "nothing is made behind the microbatch that raises"
    run = ahead.settle(APART, watched=False)
    assert run is ahead
    with pytest.raises(ReferenceRaised, match=r"on microbatch 1 .* mat1 and mat2"):
        run.contributions(APART)


PAIR = (torch.ones(2, 4), torch.zeros(2, 4))


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))


def drawing() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))


def twin_of(build: Callable[[], nn.Module]) -> tuple[SecondModel, float, Task]:
    """A second, the loss of the first model, and their task."""
    task = Task(lambda model, data: None, build, (PAIR,), nn.functional.mse_loss, None)
    model = task.build("cpu")
    second = SecondModel(task, "cpu", model)
    assert len(list(second)) == 1
    return second, task.loss.function(model(PAIR[0]), PAIR[1]).item(), task


@pytest.mark.parametrize(
    ("build", "known", "told"),
    [
        (seeded, None, ""),
        (seeded, float("nan"), "two forwards of microbatch 0 from equal weights gave losses nan and"),
        (drawing, None, "called twice it gave other weights, first 0.weight"),
        (dropping, None, "switch dropout off"),
    ],
)
def test_a_second_model_is_like_the_first(build: Callable[[], nn.Module], known: float | None, told: str) -> None:
    second, loss, task = twin_of(build)
    assert bool(second.other_weights) == (build is drawing)
    found = second.other_weights or second.other_loss(loss if known is None else known, task.batches(second.model)[0])
    assert told in found
    assert bool(found) == bool(told)


class Narrow(nn.Linear):
    """Computes in bf16, by autocast or by hand; in ``halves``: as the sum of two products."""

    by_hand = halves = False

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.by_hand:
            x, weight, bias = x.to(torch.bfloat16), weight.to(torch.bfloat16), bias.to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.by_hand):
            return (self.product(x, weight) + bias).float().tanh()

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Whole, or in halves."""
        if not self.halves:
            return x @ weight.t()
        return x[:, :4] @ weight[:, :4].t() + x[:, 4:] @ weight[:, 4:].t()


class ByHand(Narrow):
    """The same, cast by hand."""

    by_hand = True


def in_halves(model: nn.Sequential, microbatches: list[Any], *, factor: float = 1.0) -> Any:
    """``factor``: the first stage's gradients come with it."""
    stage = watch(half(model))
    for layer in stage:
        layer.halves = True
    return stage, all_forward_all_backward(stage, microbatches, passed=lambda m, gradient: factor * gradient)


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize(("block", "factor"), [(Narrow, 1.0), (ByHand, 1.0), (Narrow, -1.0)])
def test_what_a_narrower_type_rounds_is_right(block: type[Narrow], factor: float, whitebox: WhiteBox) -> None:
    """A fault beside it is found where it is."""
    build, run = partial(model_of, block), partial(in_halves, factor=factor)
    verdict = whitebox.validate(run, reference=build, microbatches=data(), ranks=2, loss_fn=loss_fn)
    if factor == 1.0:
        assert (verdict.outcome, verdict.tier) == ("pass", "bf16"), verdict
        assert verdict.law("gradient").exact == 0, "and no gradient is what another kernel gives"
    assert [(one.kind, one.stage) for one in verdict.causes] == [("sign", 0)] * (factor != 1.0), verdict
