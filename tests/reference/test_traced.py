"""Contributions in models that are not ours: the same as our own pairing gives, or honestly none."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.own.stages import layers_of, owners
from pipeproof.reference.data import Batch, Shapes, microbatches
from pipeproof.reference.model import build_model
from pipeproof.reference.pairing import Contributed, Pairing
from pipeproof.reference.step import Loss, Recipe
from pipeproof.reference.traced import Traced
from tests.support.golden import golden
from tests.support.steps import pairs

SPLIT, COUNT = (1, 2, 1), 3


def both(name: str) -> tuple[Pairing, Traced]:
    """One step of one of our models: as ours, and as one of which nothing is known but the parameters of stages."""
    model = build_model(name, layers=sum(SPLIT), seed=0)
    batches = microbatches(name, count=COUNT, shapes=Shapes(), seed=0)
    before = {key: value.detach() for key, value in model.named_parameters(remove_duplicate=False)}
    own = Pairing(model, before=before, layers=layers_of(SPLIT), batches=batches, recipe=Recipe())
    return own, traced(model, batches, owners(model, SPLIT), Loss(model.mean_loss, COUNT))


def traced(
    model: nn.Module,
    batches: Sequence[Batch] | None = None,
    owner: Mapping[str, int] | None = None,
    loss: Loss | Callable[..., Any] = nn.functional.mse_loss,
) -> Traced:
    """``owner``: the stage of each parameter; None: one for each block."""
    batches, loss = batches or own_batches(), loss if isinstance(loss, Loss) else Loss(loss, COUNT)
    owner = {name: int(name.split(".")[1]) for name, _ in model.named_parameters()} if owner is None else owner
    again = copy.deepcopy(model)
    losses = [loss.function(again(*batch.inputs), batch.target).item() for batch in batches]
    held = {(stage, name) for name, stage in owner.items()}
    return Traced(model, held=held, batches=batches, loss=loss, losses=losses, ends={})


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def alike(one: Contributed, other: Contributed) -> bool:
    return one.gradients.keys() == other.gradients.keys() and all(
        mine is other.gradients[name] is None or torch.allclose(mine, other.gradients[name])
        for name, mine in one.gradients.items()
    )


@pytest.mark.parametrize("name", ["mlp", "gpt-tied", "pair"])
def test_pairs_are_those_of_our_own_pairing(name: str) -> None:
    own, other = both(name)
    assert (other.stages, other.microbatches, other.unpaired) == (own.stages, own.microbatches, "")
    for stage in range(own.stages):
        assert other.parameters(stage).keys() == own.parameters(stage).keys()
        assert alike(other.contribution(stage, 1), own.contribution(stage, 1))
        for of in (Pairing.seed, Pairing.flow):
            (mine,), (its,) = (side.pair(stage, 0, [getattr(side, of.__name__)(stage, 2)]) for side in (own, other))
            assert alike(mine, its)


class Bypass(nn.Module):
    """The output of the first block passes by the second one, outside of any module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        return self.blocks[2](torch.tanh(self.blocks[1](first)) + first)


def own_batches() -> list[Batch]:
    return [Batch((x,), target, 20) for x, target in pairs(COUNT, rows=5, width=4)]


def test_what_passes_by_a_stage_outside_of_modules_is_followed() -> None:
    found = traced(seeded(Bypass))
    assert found.unpaired == ""
    (made,) = found.pair(0, 0, [found.flow(0, 0)])
    assert alike(made, found.contribution(0, 0))


class Added(nn.Module):
    """Adds what it is given up, in its own sum, before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: Any) -> Any:
        made, total = given if isinstance(given, tuple) else (given, torch.tanh(given))
        total = total + made
        return self.linear(torch.tanh(total)), total


class Streams(nn.Module):
    """A residual stream; ``skip``: what the first block makes goes on to the last as it is."""

    def __init__(self, *, skip: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Added() for _ in range(4))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        given = first = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            given = block(given)
        return given[0] * first[0] if self.skip else given[0]


@pytest.mark.parametrize("skip", [False, True])
def test_what_one_of_several_streams_is_made_of_may_be_another_of_them(skip: bool) -> None:
    model = seeded(partial(Streams, skip=skip))
    owner = {name: int(name.split(".")[1]) // 2 for name, _ in model.named_parameters()}
    found = traced(model, owner=owner)
    assert found.unpaired == ""
    golden("\n".join(sorted(found.end(0))))
    for stage in range(2):
        (made,) = found.pair(stage, 1, [found.seed(stage, 1)])
        assert alike(made, found.contribution(stage, 1))


class Headless(Bypass):
    """The first parameters are used at the end as well, so that no tensor separates the stages."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.blocks[0].weight


def test_where_no_tensor_separates_stages_there_are_no_pairs_and_that_is_said() -> None:
    found = traced(seeded(Headless))
    golden(found.unpaired)
    assert found.pair(0, 0, [found.flow(0, 1)]) == [None]
    assert found.contribution(0, 0).gradients["blocks.0.weight"].any()


class Counting(Bypass):
    """Gives what depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls.clone()


def test_contributions_are_those_of_the_calls_in_order() -> None:
    own, found = seeded(Counting), traced(seeded(Counting))
    for j, batch in enumerate(own_batches()):
        loss = nn.functional.mse_loss(own(batch.inputs[0]), batch.target) / COUNT
        (gradient,) = torch.autograd.grad(loss, own.get_parameter("blocks.1.weight"))
        made = found.contribution(1, j).gradients["blocks.1.weight"]
        torch.testing.assert_close(made.float(), gradient)


class OneType(nn.Module):
    """Runs in fp32 only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x) @ torch.eye(4, dtype=torch.float32))


def test_a_model_that_does_not_run_in_fp64_is_run_as_it_is() -> None:
    found = traced(OneType())
    assert found.parameters(0)["blocks.0.weight"].dtype is torch.float32
    assert found.unpaired == ""


def test_a_loss_that_the_model_makes_itself_has_no_other_target() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.Flatten(0))
    batches = [Batch(batch.inputs, torch.empty(0), 0) for batch in own_batches()]
    loss = Loss(lambda output, target: output.square().mean(), COUNT)
    found = traced(model, batches, {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1}, loss)
    assert found.pair(1, 0, [found.seed(1, 2)]) == [None]


def test_stages_that_are_too_large_for_pairs_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeproof.reference.traced._MOST", 100)
    _, found = both("mlp")
    golden(found.unpaired)


class Entropy(torch.autograd.Function):
    """A cross entropy whose backward makes its gradient of the softmax that the forward saved, in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        softmax = logits.softmax(-1)
        ctx.save_for_backward(softmax, target)
        return -softmax.log().gather(-1, target[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        softmax, target = ctx.saved_tensors
        softmax.scatter_add_(-1, target[:, None], torch.full_like(softmax[:, :1], -1.0))
        return softmax.mul_(gradients[0] / len(target)), None


def test_a_backward_that_writes_into_what_its_forward_saved_is_walked_several_times() -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [
        Batch((torch.randn(5, 4, generator=draw),), torch.randint(4, (5,), generator=draw), 5) for _ in range(COUNT)
    ]
    found, plain = (traced(seeded(Bypass), batches, loss=one) for one in (Entropy.apply, nn.functional.cross_entropy))
    for one in (found, plain):
        assert one.unpaired == ""
    for stage in range(3):
        assert alike(found.contribution(stage, 1), plain.contribution(stage, 1))
        (mine,), (its,) = (side.pair(stage, 0, [side.flow(stage, 2)]) for side in (found, plain))
        assert alike(mine, its)


class Stored(torch.autograd.Function):
    """A linear layer that writes the gradient of a weight, as stores of weight gradients do.

    It is the one that the forward saved; or else ``late`` has it, of which autograd does not know.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, late: nn.Linear | None = None) -> Tensor:
        ctx.late = late
        ctx.save_for_backward(x, weight)
        return x @ (weight if late is None else late.weight.detach()).T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        weight = weight if ctx.late is None else ctx.late.weight
        made = gradients[0].flatten(0, -2).T @ x.flatten(0, -2)
        weight.grad = made if weight.grad is None else weight.grad + made
        return gradients[0] @ weight, None, None


class Storing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Stored.apply(x, self.weight)


def test_contributions_that_a_backward_writes_to_the_weight_that_it_saved() -> None:
    def chain(layer: type[nn.Linear]) -> nn.Module:
        return seeded(lambda: nn.Sequential(*(layer(4, 4, bias=False) for _ in range(2))))

    found, plain = (traced(chain(layer), owner={"0.weight": 0, "1.weight": 1}) for layer in (Storing, nn.Linear))
    for stage in range(2):
        for j in range(COUNT):
            assert alike(found.contribution(stage, j), plain.contribution(stage, j))
    assert found.unpaired  # what writes past autograd cannot be paired anew
