"""Gradients that code writes past autograd are those of the reference too."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.reference.accumulation import Accumulation
from pipeproof.reference.data import Batch
from pipeproof.reference.graded import differentiate
from pipeproof.reference.step import Contribution, Loss, Recipe, Reference
from pipeproof.whitebox import WhiteBox
from tests.reference.test_traced import Stored, Storing
from tests.support.golden import golden
from tests.support.two_ranks import WIDTH, judged, model_of, named, passes, step, without_second


class ToItsOwn(nn.Linear):
    """Writes to the weights that the module has when the backward runs, which autograd does not know of."""

    def forward(self, x: Tensor) -> Tensor:
        return Stored.apply(x if x.requires_grad else x.requires_grad_(), None, self)


class Keeps(nn.Linear):
    """Its gradients are nowhere when the backward is over."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x if x.requires_grad else x.requires_grad_(), self.weight.detach())


def written(layer: type[nn.Linear]) -> nn.Sequential:
    return model_of(lambda: nn.Sequential(layer(WIDTH, WIDTH, bias=False), nn.Tanh()))


@pytest.mark.parametrize("layer", [Storing, ToItsOwn])
def test_a_reference_that_writes_gradients_itself_has_them(whitebox: WhiteBox, layer: type[nn.Linear]) -> None:
    assert passes(judged(whitebox, step, partial(written, layer))).law("gradient").checked == 4
    found = named(judged(whitebox, partial(step, call=without_second), partial(written, layer)))
    assert found[0] == ("dropped", 0, 0, (2,)), found


@pytest.mark.sweep
def test_a_reference_without_any_gradient_fails_nothing(whitebox: WhiteBox) -> None:
    def full(model: nn.Sequential, microbatches: list[Any]) -> Any:
        handed = step(model, microbatches)
        for parameter in handed[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        return handed

    verdict = judged(whitebox, full, partial(written, Keeps))
    assert verdict.outcome == "unknown"
    golden(verdict.headline)


def test_what_an_objective_reaches_past_its_leaves_stays_as_it_was() -> None:
    own, outside = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([3.0]))
    outside.grad = torch.tensor([5.0])
    leaf = own.detach().requires_grad_()
    (found,) = differentiate((leaf * outside + own * 7).sum(), [leaf], [own])
    assert found.tolist() == [10.0]  # 3 through the leaf, 7 past it
    assert (own.grad, outside.grad.tolist()) == (None, [5.0])


def test_a_graph_of_a_very_long_chain_ends_no_process() -> None:
    """Torch frees such a graph only where Python did not walk all of it."""
    weight = torch.ones(1, requires_grad=True)
    made = weight * 1
    for _ in range(60_000):
        made = made * 1.0
    (found,) = differentiate(made, [weight], [weight])
    assert found.tolist() == [1.0]
    del made


BF16, FP32 = torch.bfloat16, torch.float32
NAME = "words.weight"
OWNER = {NAME: 0, "inner.weight": 1, "inner.bias": 1}


class Tied(nn.Module):
    """Words go in and come out by one weight, and do so ``more`` times in between."""

    def __init__(self, more: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.more = nn.Embedding(16, 8), nn.Linear(8, 8), more

    def forward(self, words: Tensor) -> Tensor:
        made: Tensor = self.words(words)
        for _ in range(self.more):
            made = torch.tanh(made @ self.words.weight.t() @ self.words.weight)
        return torch.tanh(self.inner(made)) @ self.words.weight.t()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten())


def words(count: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [Batch.of(*torch.randint(16, (2, 2, 5), generator=draw)) for _ in range(count)]


def reference(*, by: Accumulation, more: int = 0, by_use: bool = True) -> tuple[Reference, tuple[Contribution, ...]]:
    """Of a pipeline of three stages, of which the first and the last have the weight."""
    recipe = Recipe(Loss(loss, 4.0), accumulation=by)
    made = Reference(Tied(more).to(BF16), owner=OWNER, recipe=recipe, copies=[(2, NAME)], by_use=by_use)
    return made, made.contribute(words(4))


def total(made: Reference, contributions: tuple[Contribution, ...]) -> Tensor:
    orders = {0: (0, 1, 2, 3), 1: (0, 1, 2, 3), 2: (3, 2, 1, 0)}
    found = made.total(made.accumulate(contributions, orders=orders))
    assert found[0, NAME] is found[2, NAME]
    return found[0, NAME]  # type: ignore[return-value]


def test_each_use_is_added_up_by_itself_in_the_order_of_its_stage() -> None:
    made, contributions = reference(by=Accumulation())
    into, out = zip(*(one.uses[NAME] for one in contributions), strict=True)
    assert [int((one != 0).any(dim=1).sum()) for one in out] == [16] * 4  # the last layer uses every word
    assert all(int((one != 0).any(dim=1).sum()) < 16 for one in into)
    expected = (((into[0] + into[1]) + into[2]) + into[3]) + (((out[3] + out[2]) + out[1]) + out[0])
    assert torch.equal(total(made, contributions), expected)
    together = total(*reference(by=Accumulation(), by_use=False))
    assert not torch.equal(together, expected)


@pytest.mark.parametrize("first", [False, True])
def test_copies_are_added_up_before_replicas_or_after_them(first: bool) -> None:
    made, contributions = reference(by=Accumulation(FP32, BF16, shares=((0, 1), (2, 3)), tied_first=first))
    wide = [[one.float() for one in use] for use in zip(*(one.uses[NAME] for one in contributions), strict=True)]
    (a, b), (c, d) = (((one[0] + one[1]), (one[2] + one[3])) for one in wide)
    if first:
        expected = ((a + c).to(BF16) + (b + d).to(BF16)).float()
    else:
        expected = (a.to(BF16) + b.to(BF16)).float() + (c.to(BF16) + d.to(BF16)).float()
    assert torch.equal(total(made, contributions), expected)


def test_the_same_is_added_up_whoever_has_the_uses() -> None:
    each = [total(*reference(by=Accumulation(FP32), by_use=one)) for one in (False, True)]
    assert torch.allclose(*each, rtol=2**-7, atol=2**-9)


def test_more_uses_than_stages_are_not_told_apart() -> None:
    made, contributions = reference(by=Accumulation(), more=1)
    assert {len(one.uses[NAME]) for one in contributions} == {4}
    whole = [one.gradients[0, NAME] for one in contributions]
    assert torch.equal(total(made, contributions), ((whole[0] + whole[1]) + whole[2]) + whole[3])  # type: ignore[operator]


def test_what_an_operation_gives_otherwise_than_autograd_is_not_told_apart() -> None:
    class Storing(Tied):
        def forward(self, words: Tensor) -> Tensor:
            return Stored.apply(self.inner(self.words(words)), self.words.weight)  # type: ignore[no-any-return]

    made = Reference(Storing(0), owner=OWNER, recipe=Recipe(Loss(loss, 1.0)), copies=[(2, NAME)], by_use=True)
    (one,) = made.contribute([Batch.of(torch.arange(5)[None], torch.arange(5)[None])])
    assert one.gradients[0, NAME] is not None
    assert NAME not in one.uses


class TwoNames(Tied):
    """The last layer has the weight under a name of its own, too, and uses it by the first."""

    def __init__(self, more: int) -> None:
        super().__init__(more)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight


@pytest.mark.parametrize("stage", [0, 2])
def test_a_weight_of_two_names_has_all_that_its_uses_give(stage: int) -> None:
    owner = {**OWNER, "head.weight": stage}
    model = TwoNames(0)
    made = Reference(model, owner=owner, recipe=Recipe(Loss(loss, 2.0)), copies=[(2, NAME)], by_use=True)
    contributions = made.contribute(words(2))
    found = made.total(made.accumulate(contributions, orders=dict.fromkeys(range(3), (0, 1))))[0, NAME]
    for one in words(2):
        (loss(model(*one.inputs), one.target) / 2.0).backward()
    torch.testing.assert_close(found, model.words.weight.grad)
