"""Faults planted in the four foreign runtimes from outside: their functions, messages, data and gradients are changed
while a step runs. Each has the cause that is to be named."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hand_written_1f1b import OneFOneB
from interleaved_loop import Links
from test_whitebox_runtimes import COUNT, RANKS, hand_written, interleaved, loss_fn, pipelining, zero_bubble
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from weight_grad_store import StoredLinear, WeightGradStore, _Linear

Step = Callable[..., Any]


@dataclass(frozen=True)
class Planted:
    """A fault: what is done, while a step of ``runtime`` runs and around it, and the cause to be named.

    ``during`` is open while the step runs; ``around`` is called with step, model and microbatches. ``alike``
    are kinds that final gradients alone cannot tell from ``kind``, or that are as true. ``names`` are other values for
    what the step knows by these names.
    """

    name: str
    runtime: Step
    kind: str
    during: Callable[[], Any] = nullcontext
    around: Callable[[Step, Any, Any], Any] | None = None
    rank: int | None = None
    stage: int | None = None
    microbatches: tuple[int, ...] = ()
    alike: tuple[str, ...] = ()
    names: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module, microbatches: list[Any], *, watched: bool = True) -> Any:
        names = self.names if watched else {**self.names, "watch": lambda module: module}
        with mock.patch.dict(self.runtime.__globals__, names), self.during():
            if self.around is not None:
                return self.around(self.runtime, model, microbatches)
            return self.runtime(model, microbatches)


@contextmanager
def changed(owner: Any, name: str, change: Callable[..., Any], *, on: Sequence[int] = range(RANKS)) -> Iterator[None]:
    """``owner.name`` is ``change(the original, ...)`` on the ranks ``on``."""
    original = getattr(owner, name)

    def instead(*arguments: Any, **named: Any) -> Any:
        return change(original, *arguments, **named)

    with mock.patch.object(owner, name, instead) if dist.get_rank() in on else nullcontext():
        yield


def at_call(
    number: int,
    owner: Any,
    name: str,
    change: Callable[..., Any],
    *,
    on: Sequence[int],
    counts: Callable[..., bool] = lambda *given: True,
) -> Callable[[], Any]:
    """The call of this ``number``, from 1, of those of ``owner.name`` that count is ``change(the original, ...)``."""

    def during() -> Any:
        calls = itertools.count(1)

        def instead(original: Any, *given: Any, **named: Any) -> Any:
            there = counts(*given) and next(calls) == number
            return change(original, *given, **named) if there else original(*given, **named)

        return changed(owner, name, instead, on=on)

    return during


def on_gradients(rank: int, change: Callable[[Tensor], Tensor | None], part: int = 0) -> Callable[..., Any]:
    """When the step is over, ``change`` the gradients of one of a rank's modules."""

    def around(step: Step, model: Any, microbatches: Any) -> Any:
        made, losses = step(model, microbatches)
        if dist.get_rank() == rank:
            for parameter in (made[part] if isinstance(made, list) else made).parameters():
                parameter.grad = change(parameter.grad)
        return made, losses

    return around


def with_data(rank: int, *, targets: Sequence[int] = (), inputs: Sequence[int] = ()) -> Callable[..., Any]:
    """One rank's microbatches have the first of their targets, or of their inputs, in another order."""

    def around(step: Step, model: Any, microbatches: Any) -> Any:
        xs, ys = ([*one] for one in zip(*microbatches, strict=True))
        for those, order in ((xs, inputs), (ys, targets)):
            those[: len(order)] = [those[k] for k in order]
        return step(model, [*zip(xs, ys, strict=True)] if dist.get_rank() == rank else microbatches)

    return around


# One F one B by hand.


def undivided() -> Any:
    def forward(original: Any, self: OneFOneB, m: int) -> None:
        original(self, m)
        x, y = self.live[-1]
        self.live[-1] = x, y * len(self.microbatches)

    return changed(OneFOneB, "forward", forward, on=[RANKS - 1])


def activations_crossed() -> Any:
    sent, held = [0], list[Tensor]()

    def send(original: Any, self: OneFOneB, tensor: Tensor, peer: int) -> None:
        if peer < self.rank:
            original(self, tensor, peer)
            return
        sent[0] += 1
        if sent[0] == 3:
            held.append(tensor)  # overtaken by the next one
            return
        original(self, tensor, peer)
        if held:
            original(self, held.pop(), peer)

    return changed(OneFOneB, "send", send, on=[1])


def one_buffer() -> Any:
    def receive(original: Any, self: OneFOneB, peer: int) -> Tensor:
        if peer > self.rank:
            return original(self, peer)
        buffer = self.buffer.detach()
        dist.irecv(buffer, peer).wait()
        return buffer

    return changed(OneFOneB, "receive", receive, on=[2])


def norms_added(step: Step, model: Any, microbatches: Any) -> Any:
    """The step also reports a norm, the sum of every rank's own one."""
    stage, losses = step(model, microbatches)
    total = torch.stack([p.grad.double().norm() for p in stage.parameters()]).norm()
    dist.all_reduce(total)
    return stage, losses, total


# The interleaved loop.


def rounded_message() -> Any:
    def send(original: Any, self: Links, tensor: Tensor, stage: int, tag: int) -> None:
        activation = tag % 2 == 0
        original(self, tensor.bfloat16().float() if activation and stage == 3 else tensor, stage, tag)

    return changed(Links, "send", send, on=[2])


def chunks_exchanged(step: Step, model: Any, microbatches: Any) -> Any:
    if dist.get_rank() != 1:
        return step(model, microbatches)
    other = nn.Sequential(*model)
    other[1], other[5] = model[5], model[1]
    return step(other, microbatches)


def backward_twice(original: Any, self: Tensor, gradient: Tensor | None = None, **more: Any) -> None:
    original(self, gradient, retain_graph=True)
    original(self, gradient, **more)


def gradients_crossed() -> Any:
    def send(original: Any, self: Links, tensor: Tensor, stage: int, tag: int) -> None:
        original(self, tensor, stage, {1: 3, 3: 1}.get(tag, tag) if stage == 2 else tag)

    return changed(Links, "send", send, on=[3])


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


def clear_midway(stage: Any, microbatch: int) -> None:
    if microbatch == 2:
        stage.submod.zero_grad(set_to_none=True)


def scale_back(stage: Any, microbatch: int) -> None:
    """What it hands on is twice the gradient that it should be."""
    stage.bwd_cache[microbatch] = tuple(2 * one for one in stage.bwd_cache[microbatch])


FAULTS = (
    Planted("undivided", hand_written, "scale", undivided),
    Planted("last backward forgotten", hand_written, "dropped",
            at_call(COUNT, OneFOneB, "backward", lambda original, self: self.receive(self.rank + 1), on=[0]),
            rank=0, stage=0, microbatches=(7,)),
    Planted("negated", hand_written, "sign", around=on_gradients(2, lambda g: -g), rank=2, stage=2),
    Planted("activations crossed", hand_written, "wrong-message", activations_crossed, rank=2, stage=2,
            microbatches=(2, 3), alike=("mispaired", "swapped-activations")),
    Planted("one buffer", hand_written, "overwritten", one_buffer, rank=2, stage=2,
            alike=("swapped-activations",)),
    Planted("other labels", hand_written, "swapped-data", around=with_data(3, targets=(0, 1, 2, 3, 5, 4)),
            microbatches=(4, 5)),
    Planted("zero sent back", hand_written, "altered",
            at_call(2, OneFOneB, "send", lambda original, self, sent, peer: original(self, sent * 0, peer),
                    on=[2], counts=lambda self, sent, peer: peer < self.rank),
            rank=1, stage=1, microbatches=(1,), alike=("dropped",)),
    Planted("norms added", hand_written, "norm", around=norms_added),
    Planted("rounded message", interleaved, "rounded", rounded_message, rank=3, stage=3),
    Planted("chunks exchanged", interleaved, "partition", around=chunks_exchanged, rank=1),
    Planted("inputs exchanged", interleaved, "swapped-data", around=with_data(0, inputs=(1, 0), targets=(1, 0)),
            microbatches=(0, 1)),
    Planted("divided twice", interleaved, "scale",
            names={"loss_fn": lambda output, target: loss_fn(output, target) / COUNT}),
    Planted("backward twice", interleaved, "doubled",  # of the later chunk, and of microbatch 0
            at_call(1, torch.Tensor, "backward", backward_twice, on=[2]), rank=2, stage=6, microbatches=(0,)),
    Planted("stage doubled", interleaved, "scale", around=on_gradients(2, lambda g: 2 * g, 1), rank=2, stage=6),
    Planted("gradients crossed", interleaved, "wrong-message", gradients_crossed, rank=2, stage=2,
            microbatches=(0, 1), alike=("mispaired", "swapped-gradients")),
    Planted("losses reversed", interleaved, "report", rank=3,
            around=lambda step, *given: (lambda made, losses: (made, losses[::-1]))(*step(*given))),
    Planted("last put off forever", zero_bubble, "dropped",
            at_call(COUNT, WeightGradStore, "pop", lambda original, self: self.queue.clear(), on=[1]),
            rank=1, stage=1, microbatches=(7,)),
    Planted("put off twice", zero_bubble, "doubled", at_call(1, WeightGradStore, "pop", put_off_twice, on=[3]),
            rank=3, stage=3, microbatches=(0,)),
    Planted("latest activation", zero_bubble, "swapped-activations", latest_activation, rank=1, stage=1),
    Planted("bias forgotten", zero_bubble, "missing", bias_forgotten, rank=2, stage=2),
    Planted("not added", zero_bubble, "dropped", not_added, rank=1, stage=1, microbatches=(0, 1, 2, 3, 4, 5, 6)),
    Planted("weights of another layer", zero_bubble, "partition", around=weights_of_another_layer, rank=1, stage=1),
    Planted("unscaled", pipelining, "scale", around=lambda step, model, data: step(model, data, fault="unscaled")),
    Planted("wrong layers", pipelining, "partition", around=wrong_layers),
    Planted("targets shifted", pipelining, "swapped-data", around=with_data(3, targets=(1, 2, 3, 4, 5, 6, 7, 0))),
    Planted("cleared midway", pipelining, "dropped", after_backward(1, clear_midway), rank=1, stage=1,
            microbatches=(0, 1, 2)),
    Planted("uphill", pipelining, "sign", names={"loss_fn": lambda output, target: -loss_fn(output, target)}),
    Planted("scaled back", pipelining, "scale", after_backward(2, scale_back), rank=1, stage=1),
)  # fmt: skip
