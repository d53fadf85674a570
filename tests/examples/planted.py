"""Faults planted in two foreign runtimes from outside: their functions, messages, data and gradients are changed while
a step runs. Each has the cause that is to be named. tests/quality/truth_faults.py has those of plainer loops."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from test_whitebox_runtimes import COUNT, RANKS, loss_fn, pipelining, zero_bubble
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from weight_grad_store import StoredLinear, WeightGradStore, _Linear

Step = Callable[..., Any]


@dataclass(frozen=True)
class Planted:
    """A fault: what is done, while a step of ``runtime`` runs and around it, and the cause to be named.

    ``during`` is open while the step runs; ``around`` is called with step, model and microbatches. ``names`` are other
    values for what the step knows by these names.
    """

    name: str
    runtime: Step
    kind: str
    during: Callable[[], Any] = nullcontext
    around: Callable[[Step, Any, Any], Any] | None = None
    rank: int | None = None
    stage: int | None = None
    microbatches: tuple[int, ...] = ()
    names: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module, microbatches: list[Any], *, watched: bool = True) -> Any:
        names = self.names if watched else {**self.names, "watch": lambda module: module}
        with mock.patch.dict(self.runtime.__globals__, names), self.during():
            if self.around is not None:
                return self.around(self.runtime, model, microbatches)
            return self.runtime(model, microbatches)


@contextmanager
def changed(owner: Any, name: str, change: Callable[..., Any], *, on: Sequence[int]) -> Iterator[None]:
    """``owner.name`` is ``change(the original, ...)`` on the ranks ``on``."""
    original = getattr(owner, name)

    def instead(*arguments: Any, **named: Any) -> Any:
        return change(original, *arguments, **named)

    with mock.patch.object(owner, name, instead) if dist.get_rank() in on else nullcontext():
        yield


def at_call(number: int, owner: Any, name: str, change: Callable[..., Any], on: Sequence[int]) -> Callable[[], Any]:
    """The call of this ``number``, from 1, of ``owner.name`` is ``change(the original, ...)``."""

    def during() -> Any:
        calls = itertools.count(1)

        def instead(original: Any, *given: Any, **named: Any) -> Any:
            return change(original, *given, **named) if next(calls) == number else original(*given, **named)

        return changed(owner, name, instead, on=on)

    return during


# The store of weight gradients.


def put_off_twice(original: Any, self: WeightGradStore) -> None:
    self.queue.appendleft(self.queue[0])
    original(self)
    original(self)


def latest_activation() -> Any:
    """The activation is kept on the layer, where the next forward overwrites it."""

    def forward(original: Any, ctx: Any, x: Tensor, anchor: Tensor, layer: Any) -> Tensor:
        layer.latest = x.detach()
        return original(ctx, x, anchor, layer)

    def backward(original: Any, ctx: Any, gradient: Tensor) -> Any:
        layer = ctx.layer
        x = layer.latest
        layer.store.cache.append(lambda: layer.add(gradient.T @ x, gradient.sum(0)))
        return gradient @ layer.weight, None, None

    @contextmanager
    def both() -> Iterator[None]:
        with changed(_Linear, "forward", forward, on=[1]), changed(_Linear, "backward", backward, on=[1]):
            yield

    return both()


def bias_forgotten() -> Any:
    def add(original: Any, self: StoredLinear, weight: Tensor, bias: Tensor) -> None:
        self.weight.grad = weight if self.weight.grad is None else self.weight.grad + weight

    return changed(StoredLinear, "add", add, on=[2])


def not_added() -> Any:
    def add(original: Any, self: StoredLinear, weight: Tensor, bias: Tensor) -> None:
        self.weight.grad, self.bias.grad = weight, bias

    return changed(StoredLinear, "add", add, on=[1])


def weights_of_another_layer(step: Step, model: Any, microbatches: Any) -> Any:
    if dist.get_rank() == 1:
        model[2].load_state_dict(model[0].state_dict())
    return step(model, microbatches)


# A schedule of torch's.


def wrong_layers(step: Step, model: Any, microbatches: Any) -> Any:
    shifted = nn.Sequential(*model[:2], *model[1:3], *model[4:]) if dist.get_rank() == 1 else model
    return step(shifted, microbatches)


def after_backward(rank: int, change: Callable[[Any, int], object]) -> Callable[[], Any]:
    """``change``, which is given the stage and the microbatch, follows each of a rank's backwards."""

    def backward_one_chunk(original: Any, self: Any, microbatch: int, *more: Any, **named: Any) -> Any:
        made = original(self, microbatch, *more, **named)
        change(self, microbatch)
        return made

    return lambda: changed(PipelineStage, "backward_one_chunk", backward_one_chunk, on=[rank])


def targets_shifted(step: Step, model: Any, microbatches: Any) -> Any:
    """The last rank has each microbatch's target one too late."""
    xs, ys = zip(*microbatches, strict=True)
    return step(model, [*zip(xs, (*ys[1:], ys[0]), strict=True)] if dist.get_rank() == RANKS - 1 else microbatches)


def clear_midway(stage: Any, microbatch: int) -> None:
    if microbatch == 2:
        stage.submod.zero_grad(set_to_none=True)


def scale_back(stage: Any, microbatch: int) -> None:
    """What it hands on is twice the gradient that it should be."""
    stage.bwd_cache[microbatch] = tuple(2 * one for one in stage.bwd_cache[microbatch])


FAULTS = (
    Planted("last put off forever", zero_bubble, "dropped",
            at_call(COUNT, WeightGradStore, "pop", lambda original, self: self.queue.clear(), [1]),
            rank=1, stage=1, microbatches=(7,)),
    Planted("put off twice", zero_bubble, "doubled", at_call(1, WeightGradStore, "pop", put_off_twice, [3]),
            rank=3, stage=3, microbatches=(0,)),
    Planted("latest activation", zero_bubble, "swapped-activations", latest_activation, rank=1, stage=1),
    Planted("bias forgotten", zero_bubble, "missing", bias_forgotten, rank=2, stage=2),
    Planted("not added", zero_bubble, "dropped", not_added, rank=1, stage=1, microbatches=(0, 1, 2, 3, 4, 5, 6)),
    Planted("weights of another layer", zero_bubble, "partition", around=weights_of_another_layer, rank=1, stage=1),
    Planted("unscaled", pipelining, "scale", around=lambda step, model, data: step(model, data, fault="unscaled")),
    Planted("wrong layers", pipelining, "partition", around=wrong_layers),
    Planted("targets shifted", pipelining, "swapped-data", around=targets_shifted),
    Planted("cleared midway", pipelining, "dropped", after_backward(1, clear_midway), rank=1, stage=1,
            microbatches=(0, 1, 2)),
    Planted("uphill", pipelining, "sign", names={"loss_fn": lambda output, target: -loss_fn(output, target)}),
    Planted("scaled back", pipelining, "scale", after_backward(2, scale_back), rank=1, stage=1),
)  # fmt: skip
