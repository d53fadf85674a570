"""A parameter that several stages use: what each of its uses gives falls to the stage that has it."""

import pytest
import torch
from torch import Tensor, nn

from pipeproof.reference.accumulation import Accumulation
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Contribution, Loss, Recipe, Reference

BF16, FP32 = torch.bfloat16, torch.float32
NAME = "words.weight"


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


def reference(*, by: Accumulation, more: int = 0, by_use: bool = True) -> tuple[Reference, tuple[Contribution, ...]]:
    """Of a pipeline of three stages, of which the first and the last have the weight."""
    owner = {NAME: 0, "inner.weight": 1, "inner.bias": 1}
    recipe = Recipe(Loss(loss, 4.0), accumulation=by)
    made = Reference(Tied(more).to(BF16), owner=owner, recipe=recipe, copies=[(2, NAME)], by_use=by_use)
    draw = torch.Generator().manual_seed(1)
    data = [torch.randint(16, (2, 2, 5), generator=draw) for _ in range(4)]
    return made, made.contribute([Batch.of(*one) for one in data])


def total(made: Reference, contributions: tuple[Contribution, ...]) -> Tensor:
    orders = {0: (0, 1, 2, 3), 1: (0, 1, 2, 3), 2: (3, 2, 1, 0)}
    found = made.total(made.accumulate(contributions, orders=orders))
    first, last = found[0, NAME], found[2, NAME]
    assert first is not None
    assert last is first
    return first


def test_each_use_is_added_up_by_itself_in_the_order_of_its_stage() -> None:
    made, contributions = reference(by=Accumulation())
    into, out = zip(*(one.uses[NAME] for one in contributions), strict=True)
    assert [int((one != 0).any(dim=1).sum()) for one in out] == [16] * 4  # the last layer uses every word
    assert all(int((one != 0).any(dim=1).sum()) < 16 for one in into)
    due = (((into[0] + into[1]) + into[2]) + into[3]) + (((out[3] + out[2]) + out[1]) + out[0])
    assert torch.equal(total(made, contributions), due)
    together = total(*reference(by=Accumulation(), by_use=False))
    assert not torch.equal(together, due)


@pytest.mark.parametrize("first", [False, True])
def test_copies_are_added_up_before_replicas_or_after_them(first: bool) -> None:
    made, contributions = reference(by=Accumulation(FP32, BF16, shares=((0, 1), (2, 3)), tied_first=first))
    wide = [[one.float() for one in use] for use in zip(*(one.uses[NAME] for one in contributions), strict=True)]
    (a, b), (c, d) = (((one[0] + one[1]), (one[2] + one[3])) for one in wide)
    if first:
        due = ((a + c).to(BF16) + (b + d).to(BF16)).float()
    else:
        due = (a.to(BF16) + b.to(BF16)).float() + (c.to(BF16) + d.to(BF16)).float()
    assert torch.equal(total(made, contributions), due)


def test_the_same_is_added_up_whoever_has_the_uses() -> None:
    each = [total(*reference(by=Accumulation(FP32), by_use=one)) for one in (False, True)]
    assert torch.allclose(*each, rtol=2**-7, atol=2**-9)


def test_more_uses_than_stages_are_not_told_apart() -> None:
    made, contributions = reference(by=Accumulation(), more=1)
    assert {len(one.uses[NAME]) for one in contributions} == {4}
    whole = [one.gradients[0, NAME] for one in contributions]
    assert torch.equal(total(made, contributions), ((whole[0] + whole[1]) + whole[2]) + whole[3])  # type: ignore[operator]


def test_what_an_operation_gives_otherwise_than_autograd_is_not_told_apart() -> None:
    class Stored(torch.autograd.Function):
        """Writes the gradient of its weight itself, as stores of weight gradients do."""

        @staticmethod
        def forward(context: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
            context.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(context: torch.autograd.function.FunctionCtx, *given: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            x, weight = context.saved_tensors  # type: ignore[attr-defined]
            made = given[0].flatten(0, 1).t() @ x.flatten(0, 1)
            weight.grad = made if weight.grad is None else weight.grad + made
            return given[0] @ weight, None

    class Storing(Tied):
        def forward(self, words: Tensor) -> Tensor:
            return Stored.apply(self.inner(self.words(words)), self.words.weight)  # type: ignore[no-any-return]

    owner = {NAME: 0, "inner.weight": 1, "inner.bias": 1}
    made = Reference(Storing(0), owner=owner, recipe=Recipe(Loss(loss, 1.0)), copies=[(2, NAME)], by_use=True)
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
    owner = {NAME: 0, "inner.weight": 1, "inner.bias": 1, "head.weight": stage}
    data = [torch.randint(16, (2, 2, 5), generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    model = TwoNames(0)
    made = Reference(model, owner=owner, recipe=Recipe(Loss(loss, 2.0)), copies=[(2, NAME)], by_use=True)
    contributions = made.contribute([Batch.of(*one) for one in data])
    found = made.total(made.accumulate(contributions, orders=dict.fromkeys(range(3), (0, 1))))[0, NAME]
    for words, target in data:
        (loss(model(words), target) / 2.0).backward()
    assert found is not None
    assert model.words.weight.grad is not None
    torch.testing.assert_close(found, model.words.weight.grad)
