"""A pipeline of pure functions: a stage maps (weights, x) to y, its pullback a gradient to two, and a step is a fold.

Nothing is added up in ``.grad``: sums are values, weights are mappings, and an update gives new ones. Each ``fault`` is
at its place in the code; the empty name is the pipeline as it should be.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from runtime_plain import one_f_one_b
from torch import Tensor, nn
from torch.func import functional_call, vjp
from truth_models import Pairs, loss_fn, through

Weights = dict[str, Tensor]
Pullback = Callable[[Tensor], tuple[Weights, Tensor | None]]
Op = tuple[str, int, int]  # F or B, the number of a chunk, a microbatch


@dataclass(frozen=True)
class Common:
    """What the asynchronous pipeline's ways have, too.

    ``pads``: where microbatches of weight zero stand; ``fill``: to which number of microbatches they fill up. ``at``
    are the ranks of a fault.
    """

    replicas: int = 1
    optimizer: str = ""
    max_norm: float = 0.0
    scale: float = 1.0
    divisor: float = 0.0
    pads: tuple[int, ...] = ()
    fill: int = 0
    fault: str = ""
    at: tuple[int, ...] = (1,)

    def bad(self, fault: str) -> bool:
        """Whether this rank has it."""
        return self.fault == fault and dist.get_rank() in self.at


@dataclass(frozen=True)
class Way(Common):
    """How a step is made.

    ``by``: "grad", of torch.autograd; "vjp"; "value", where the last stage's is vjp's with its loss in it; "again",
    where forwards keep nothing. ``order``: "1f1b", "afab" or "lifo". ``rows``: to which number of rows messages are
    filled up. ``handed``: "all", "written" to .grad, or "flat", a part of one vector, also "flat alone". ``around`` is
    called before a step with stage and data.
    """

    by: str = "grad"
    order: str = "1f1b"
    chunks: int = 1
    rate: float = 0.1
    rows: int = 0
    handed: str = "all"
    norm: bool = True
    around: Callable[[nn.Module, Pairs], None] | None = None


class Carry(NamedTuple):
    """What one tick of a step hands on to the next."""

    pullbacks: Mapping[tuple[int, int], Pullback]
    sums: tuple[Weights, ...]
    losses: Mapping[int, Tensor]


def added(one: Weights, other: Weights) -> Weights:
    """The sum of two trees."""
    return {n: one[n] + g if n in one else g for n, g in other.items()} | {n: one[n] for n in one.keys() - other.keys()}


def linearise(f: Callable[..., Any], weights: Weights, x: Any, by: str) -> tuple[Tensor, Tensor, Pullback]:
    """What ``f`` gives, what it gives aside, and its pullback."""
    if by == "vjp":
        made, back, aside = vjp(f, weights, x, has_aux=True)
        return made, aside, back
    if by == "again":
        with torch.no_grad():
            made, aside = f(weights, x)
        return made, aside, lambda g: linearise(f, weights, x, "grad")[2](g)
    leaves = {n: w.detach().requires_grad_() for n, w in weights.items()}
    leaf = x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else None
    made, aside = f(leaves, x if leaf is None else leaf)

    def back(g: Tensor) -> tuple[Weights, Tensor | None]:
        wanted = [*leaves.values(), *([] if leaf is None else [leaf])]
        found = torch.autograd.grad(made, wanted, g) if wanted and made.requires_grad else [None] * len(wanted)
        given = None if leaf is None else found[-1]
        return dict(zip(leaves, found, strict=False)), given

    return made.detach(), aside.detach(), back


@dataclass(frozen=True)
class Line:
    """One rank of a pipeline and what it works on; ``ranks`` are those of its pipeline, in order."""

    way: Way
    modules: tuple[nn.Module, ...]
    weights: tuple[Weights, ...]
    buffers: tuple[Weights, ...]
    given: list[tuple[Any, Tensor, float]]
    ranks: list[int]
    pending: list[Any] = field(default_factory=list)
    late: Weights = field(default_factory=dict)

    @property
    def place(self) -> int:
        return self.ranks.index(dist.get_rank())

    @property
    def last(self) -> int:
        return len(self.ranks) * len(self.modules) - 1

    def plan(self) -> Iterator[Op]:
        every, chunks = range(len(self.given)), range(len(self.modules))
        if len(chunks) > 1 or self.way.order != "1f1b":
            yield from (("F", c, m) for c in chunks for m in every)
            back = [*reversed(every)] if self.way.order == "lifo" else every
            yield from (("B", c, m) for c in reversed(chunks) for m in back)
            return
        yield from ((kind, 0, m) for kind, m in one_f_one_b(len(self.ranks) - 1 - self.place, len(every)))

    def function(self, chunk: int, m: int) -> Callable[[Weights, Any], tuple[Tensor, Tensor]]:
        """The stage as a function of weights and input; the last one's gives its share of the loss, and the loss."""
        target, weight = self.given[m][1:]
        if self.way.bad("target of the next"):
            target = self.given[(m + 1) % len(self.given)][1]
        number = chunk * len(self.ranks) + self.place

        def f(weights: Weights, x: Any) -> tuple[Tensor, Tensor]:
            given = x if isinstance(x, tuple) else (x,)
            y = functional_call(self.modules[chunk], (weights, self.buffers[chunk]), given)
            if number < self.last:
                return y, y
            loss = loss_fn(y[: len(target)], target)
            divisor = self.way.divisor or sum(w == 1 for *_, w in self.given)
            return loss * (weight * self.way.scale / (1.0 if self.way.bad("not divided") else divisor)), loss

        return f

    def tick(self, carry: Carry, op: Op) -> Carry:
        return (self.forward if op[0] == "F" else self.backward)(carry, *op[1:])

    def forward(self, carry: Carry, c: int, m: int) -> Carry:
        number = c * len(self.ranks) + self.place
        x, target, _ = self.given[m]
        x = self.receive(number - 1, number, m, like=target) if number else x
        by = {"value": "vjp" if number == self.last else "grad"}.get(self.way.by, self.way.by)
        y, loss, back = linearise(self.function(c, m), self.weights[c], x, by)
        if number < self.last:
            to = {1: 2, 2: 1}.get(m, m) if self.way.bad("two messages crossed") else m
            message = y + 0.1 if self.way.bad("third message altered") and m == 2 else y
            message = through(torch.bfloat16)(message) if self.way.bad("messages in bf16") else message
            self.send(message, number, number + 1, to)
        losses = {**carry.losses, m: loss} if number == self.last else carry.losses
        pullback = back if number == self.last else lambda g: back(g[: len(y)])
        return Carry({**carry.pullbacks, (c, m): pullback}, carry.sums, losses)

    def backward(self, carry: Carry, c: int, m: int) -> Carry:
        number = c * len(self.ranks) + self.place
        g = torch.ones(()) if number == self.last else self.receive(number + 1, number, m, like=self.given[m][1])
        if self.way.bad("cotangent of ones") and number < self.last:
            g = torch.ones_like(g)
        used = max(carry.pullbacks) if self.way.bad("newest pullback") else (c, m)
        if self.way.bad("last closure for all"):
            used = (c, len(self.given) - 1)
        dw, dx = carry.pullbacks[used](g)
        if number:
            dx = torch.zeros_like(dx) if self.way.bad("input gradient stopped") and m == 2 else dx
            dx = dx / 4 if self.way.bad("input gradients quartered") else dx
            to = {1: 2, 2: 1}.get(m, m) if self.way.bad("two gradients crossed") else m
            self.send(dx, number, number - 1, to)
        sums = [*carry.sums]
        sums[c] = self.summed(sums[c], {n: w for n, w in dw.items() if w is not None}, m)
        kept = self.way.bad("last closure for all")
        left = {key: back for key, back in carry.pullbacks.items() if kept or key != used}
        return Carry(left, tuple(sums), carry.losses)

    def summed(self, sums: Weights, dw: Weights, m: int) -> Weights:
        """``sums`` with the shares of one microbatch."""
        if m == len(self.given) - 1 and self.way.bad("reduced before the last"):
            self.late.update(dw)
        if m == len(self.given) - 1 and (self.way.bad("last not added") or self.late):
            return sums
        if self.way.bad("second added twice") and m == 1:
            dw = {n: 2 * g for n, g in dw.items()}
        if self.way.bad("sums of the first leaf alone") and sums:
            first = next(iter(dw))
            return {**dw, first: sums[first] + dw[first]}
        if self.way.bad("sums in bf16"):
            return {n: through(torch.bfloat16)(g) for n, g in added(sums, dw).items()}
        return added(sums, dw)

    def message(self, tensor: Tensor) -> Tensor:
        fill = max(self.way.rows - len(tensor), 0)
        return torch.cat([tensor, tensor.new_zeros(fill, *tensor.shape[1:])]).detach().contiguous()

    def send(self, tensor: Tensor, source: int, target: int, m: int) -> None:
        wire = self.message(tensor)
        tag = (2 * max(source, target) + (target < source)) * 64 + m
        self.pending.append((dist.isend(wire, self.ranks[target % len(self.ranks)], tag=tag), wire))

    def receive(self, source: int, target: int, m: int, *, like: Tensor) -> Tensor:
        buffer = self.message(like)
        tag = (2 * max(source, target) + (target < source)) * 64 + m
        dist.recv(buffer, self.ranks[source % len(self.ranks)], tag=tag)
        return buffer

    def run(self, sums: tuple[Weights, ...]) -> tuple[tuple[Weights, ...], list[Tensor]]:
        """One pass over the plan, on top of ``sums``; the losses of microbatches that count."""
        carry = reduce(self.tick, self.plan(), Carry({}, sums, {}))
        for work, _ in self.pending:
            work.wait()
        return carry.sums, [carry.losses[m] for m in sorted(carry.losses) if self.given[m][2] == 1]

    def evaluated(self) -> list[Tensor]:
        """The losses of forwards alone."""
        carry = Carry({}, (), {})
        line = replace(self, way=replace(self.way, by="again"))
        with torch.no_grad():
            for _, c, m in (op for op in self.plan() if op[0] == "F"):
                carry = line.forward(carry, c, m)
        for work, _ in self.pending:
            work.wait()
        return [carry.losses[m] for m in sorted(carry.losses)]
