"""A pipeline that is right in many ways: any tree of tensors between stages, any order, any way to call a stage."""

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from truth_models import Pairs, loss_fn, observed


def one_f_one_b(ahead: int, count: int) -> Iterator[tuple[str, int]]:
    """Forwards and backwards of one stage in turn, with ``ahead`` forwards first."""
    ahead = min(ahead, count)
    for m in range(count + ahead):
        if m < count:
            yield "F", m
        if m >= ahead:
            yield "B", m - ahead


class Meta(NamedTuple):
    """What a tensor is before its numbers are there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class How:
    """How a step is made.

    ``order`` is of backwards: "1f1b"; "naive", each right after its forward; or "fifo", "lifo" or "shuffled", after all
    forwards. ``buffers``: "fresh", or "copied" out of one that is used again. ``scale``: what the loss is multiplied
    by, and gradients divided by in the end. ``late``: gradients are divided in the end, not losses. ``summed``: "grad",
    or "kept" to the end and added last to first. ``halves``: input gradients first, weights' after the next backward.
    ``loss_fn``: None where the model has its own. ``split``: how many layers each stage has.
    """

    loss_fn: Any = loss_fn
    split: tuple[int, ...] = ()
    order: str = "1f1b"
    call: Callable[[nn.Module, tuple[Any, ...]], Any] = lambda stage, given: stage(*given)
    buffers: str = "fresh"
    scale: float = 1.0
    late: bool = False
    summed: str = "grad"
    halves: bool = False
    divisor: float = 0.0
    before: Callable[[nn.Module, Pairs], None] = lambda stage, pairs: None
    between: Callable[[nn.Module, tuple[Any, ...]], None] = lambda stage, given: None


PLAINEST = How()


class Plain:
    """One stage's part in a step; ``ranks`` are those of its pipeline, in order."""

    def __init__(self, stage: nn.Module, microbatches: Pairs, how: How, ranks: list[int]) -> None:
        self.stage, self.microbatches, self.how = stage, microbatches, how
        self.place, self.ranks = ranks.index(dist.get_rank()), ranks
        self.last = self.place == len(ranks) - 1
        self.live: dict[int, tuple[Any, Any]] = {}
        self.losses: dict[int, Tensor] = {}
        self.pending: list[Any] = []
        self.parameters = [p for p in stage.parameters() if p.requires_grad]
        self.shares: list[list[Tensor | None]] = []
        self.reused: dict[tuple[int, ...], Tensor] = {}
        self.put_off: list[Callable[[], None]] = []
        self.divisor = how.divisor or len(microbatches)

    def step(self) -> list[Tensor]:
        """The losses, in the order of microbatches, on the last rank."""
        self.how.before(self.stage, self.microbatches)
        for kind, m in self.order():
            (self.forward if kind == "F" else self.backward)(m)
        while self.put_off:
            self.put_off.pop(0)()
        for work, _ in self.pending:
            work.wait()
        self.finish()
        return [self.losses[m] for m in sorted(self.losses)]

    def order(self) -> Iterator[tuple[str, int]]:
        count = len(self.microbatches)
        backwards = list(range(count))
        if self.how.order == "lifo":
            backwards.reverse()
        elif self.how.order == "shuffled":
            random.Random(3).shuffle(backwards)
        ahead = {"1f1b": len(self.ranks) - 1 - self.place, "naive": 0}.get(self.how.order, count)
        yield from ((kind, m if kind == "F" else backwards[m]) for kind, m in one_f_one_b(ahead, count))

    def forward(self, m: int) -> None:
        inputs, target = self.microbatches[m]
        if self.place == 0:
            given = inputs if isinstance(inputs, tuple) else (inputs,)
            given = (*given, target) if self.how.loss_fn is None else given
        else:
            given = (self.receive(self.ranks[self.place - 1]),)
        made = self.how.call(self.stage, given)
        self.how.between(self.stage, given)
        if self.last:
            loss = made if self.how.loss_fn is None else self.how.loss_fn(made, target)
            self.losses[m] = loss.detach().clone()
            made = loss * self.how.scale if self.how.late else loss / self.divisor * self.how.scale
        else:
            self.send(made, self.ranks[self.place + 1])
        self.live[m] = given, made

    def backward(self, m: int) -> None:
        given, made = self.live.pop(m)
        outputs = [t for t in tree_leaves(made) if isinstance(t, Tensor) and t.requires_grad]
        arrived = [None] if self.last else self.receive(self.ranks[self.place + 1]) if outputs else []
        if self.how.summed == "kept":
            for parameter in self.parameters:
                parameter.grad = None
        pairs = [(o, g) for o, g in zip(outputs, arrived, strict=True) if self.last or g is not None]
        wanted = [t for t in tree_leaves(given) if isinstance(t, Tensor) and t.requires_grad]
        if pairs:
            self.differentiate([o for o, _ in pairs], [g for _, g in pairs], wanted)
        if self.how.summed == "kept":
            self.shares.append([p.grad for p in self.parameters])
        if self.place > 0 and wanted:
            self.send([t.grad for t in wanted], self.ranks[self.place - 1])

    def differentiate(self, outputs: list[Tensor], gradients: list[Any], wanted: list[Tensor]) -> None:
        if not self.how.halves:
            torch.autograd.backward(outputs, gradients)
            return
        if wanted:
            torch.autograd.backward(outputs, gradients, inputs=wanted, retain_graph=True)
        reached = self.parameters
        self.put_off.append(lambda: torch.autograd.backward(outputs, gradients, inputs=reached))
        if len(self.put_off) > self.place:
            self.put_off.pop(0)()

    def finish(self) -> None:
        for share in reversed(self.shares):
            for parameter, gradient in zip(self.parameters, share, strict=True):
                first = parameter.grad is None or share is self.shares[-1]
                if gradient is not None:
                    parameter.grad = gradient if first else parameter.grad + gradient
        divisor = self.how.scale * (self.divisor if self.how.late else 1.0)
        for parameter in self.parameters if divisor != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)

    def send(self, tree: Any, peer: int) -> None:
        metas = tree_map(lambda t: Meta(tuple(t.shape), t.dtype, t.requires_grad) if isinstance(t, Tensor) else t, tree)
        head = torch.frombuffer(bytearray(pickle.dumps(metas)), dtype=torch.uint8)
        leaves = [t.detach().contiguous() for t in tree_leaves(tree) if isinstance(t, Tensor)]
        for message in (torch.tensor([head.numel()]), head, *leaves):
            wire = message.view(torch.uint8) if message.dtype == torch.bool else message
            self.pending.append((dist.isend(wire, peer), wire))

    def receive(self, peer: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, peer)
        head = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(head, peer)
        metas = pickle.loads(bytes(head.tolist()))
        is_meta = lambda node: isinstance(node, Meta)  # noqa: E731
        return tree_map(lambda m: self.one(m, peer) if is_meta(m) else m, metas, is_leaf=is_meta)

    def one(self, meta: Meta, peer: int) -> Tensor:
        if self.how.buffers == "copied":
            buffer = self.reused.setdefault(meta.shape, torch.empty(meta.shape, dtype=meta.dtype))
        else:
            buffer = torch.empty(meta.shape, dtype=meta.dtype)
        dist.recv(buffer.view(torch.uint8) if meta.dtype == torch.bool else buffer, peer)
        tensor = buffer.clone() if self.how.buffers == "copied" else buffer
        return tensor.requires_grad_(meta.requires_grad)


def exchange(own: Tensor, peer: int) -> Tensor:
    """What two ranks have, added in the same order on both."""
    other, sent = torch.empty_like(own), own.clone()
    work = dist.isend(sent, peer, tag=77)
    dist.recv(other, peer, tag=77)
    work.wait()
    return own + other if dist.get_rank() < peer else other + own


def own(model: nn.Sequential, split: tuple[int, ...] = ()) -> nn.Sequential:
    """The layers of this rank: as many as others, and more on the first where that cannot be."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = split or [len(model) // ranks + (r < len(model) % ranks) for r in range(ranks)]
    return model[sum(each[:rank]) :][: each[rank]]


def step(
    model: Any,
    microbatches: Pairs,
    *,
    how: How = PLAINEST,
    watched: bool = True,
    stage: nn.Module | None = None,
    ranks: Sequence[int] = (),
    part: Callable[..., Plain] = Plain,
) -> Any:
    """One step on ``ranks``, or on as many as there are; hands back the stage and the losses."""
    stage = own(model, how.split) if stage is None else stage
    pipeline = part(observed(stage, watched), microbatches, how, [*(ranks or range(dist.get_world_size()))])
    return stage, pipeline.step() or None
