"""An asynchronous pipeline: receives are posted ahead or run on threads, sends are in flight, what came is taken up.

Each ``fault`` is at its place in the code; the empty name is the pipeline as it should be.
"""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from runtime_functional import Common
from torch import Tensor, nn
from truth_models import Pairs, loss_fn, through


def take_turns(peer: int, *, first: bool) -> None:
    """In a fault, the rank that is ``first`` is too early, and ``peer`` goes on after that, on every machine."""
    (dist.send if first else dist.recv)(torch.zeros(1), peer, tag=9)


@dataclass(frozen=True)
class Way(Common):
    """How a step is made.

    ``receive``: "posted" ahead, or on a "thread". ``slots``: of the rings of buffers; 0: each message has its own.
    ``greedy``: a backward is taken up as soon as its message is there. ``worker``: forwards run on another thread.
    ``call``: how a stage is called; ``around``: in which context forwards run. ``halves``: a backward takes the rows of
    its output in two parts. ``reduce``: "end", or by "hooks", overlapped. ``gathered``: each replica keeps a part of
    the weights, and pre-hooks gather them. ``late``: pre-hooks write new weights. ``main``: gradients are added up in a
    ``main_grad`` of the "parameter" or the "module". ``before`` and ``between`` are called before a step and after each
    forward.
    """

    receive: str = "posted"
    slots: int = 0
    greedy: bool = False
    worker: bool = False
    call: Callable[[nn.Module, Tensor], Tensor] = lambda stage, x: stage(x)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    halves: bool = False
    reduce: str = "end"
    gathered: bool = False
    late: bool = False
    main: str = ""
    before: Callable[[nn.Module, Pairs], None] | None = None
    between: Callable[[nn.Module, Tensor], None] | None = None
    evaluation: Callable[[], AbstractContextManager[Any]] = torch.no_grad


class Inbox:
    """What comes from one neighbour, in order: received ahead of time."""

    def __init__(self, peer: int, like: list[Tensor], tag: int, way: Way) -> None:
        self.peer, self.like, self.tag, self.way = peer, like, tag, way
        self.posted: list[tuple[Any, Tensor]] = []
        self.count, self.came = 0, queue.Queue[Tensor]()
        slots = 1 if way.bad("received into one buffer") else way.slots
        self.ring = [torch.zeros_like(like[0]) for _ in range(slots)]
        if way.receive == "thread":
            self.thread = Thread(target=self.listen, daemon=True)
            self.thread.start()
        else:
            for _ in range(slots or len(like)):
                self.post()

    def listen(self) -> None:
        for one in self.like:
            buffer = torch.empty_like(one)
            dist.recv(buffer, self.peer, tag=self.tag)
            self.came.put(buffer)

    def post(self) -> None:
        if self.count < len(self.like):
            buffer = self.ring[self.count % len(self.ring)] if self.ring else torch.zeros_like(self.like[self.count])
            self.posted.append((dist.irecv(buffer, self.peer, tag=self.tag), buffer))
            self.count += 1

    @property
    def ready(self) -> bool:
        return not self.came.empty() if self.way.receive == "thread" else self.posted[0][0].is_completed()

    def take(self, m: int) -> Tensor:
        """The next message."""
        if self.way.receive == "thread":
            return self.came.get(timeout=60)
        if not self.posted:
            self.post()
        work, buffer = self.posted.pop(0)
        if self.way.bad("read before it came") and (self.tag, m) == (2, 2):
            early = buffer.clone()
            take_turns(self.peer, first=True)
            work.wait()
            return early
        work.wait()
        if not self.ring:
            return buffer
        if self.way.bad("received into one buffer"):
            return buffer.detach()
        message = buffer.clone()
        self.post()
        return message


class Outbox:
    """What goes to one neighbour: copied to a buffer that is free again once it was sent."""

    def __init__(self, peer: int, tag: int, way: Way) -> None:
        self.peer, self.tag, self.way = peer, tag, way
        self.flying: list[tuple[Any, Tensor]] = []
        self.ring: list[Tensor] = []

    def post(self, tensor: Tensor) -> None:
        third = (self.tag, len(self.flying)) == (2, 2) and self.peer in self.way.at
        if self.way.fault == "read before it came" and third:
            take_turns(self.peer, first=False)
        careless = self.way.bad("sent out of one buffer")
        if (self.way.slots or careless) and len(self.ring) >= (self.way.slots or 1):
            buffer = self.ring.pop(0)
            if not careless:
                self.flying.pop(0)[0].wait()
            buffer.copy_(tensor)
        else:
            buffer = tensor.detach().clone()
        self.ring.append(buffer)
        self.flying.append((dist.isend(buffer, self.peer, tag=self.tag), buffer))
        if careless and len(self.flying) == 3:
            take_turns(self.peer, first=True)

    def flush(self) -> None:
        for work, _ in self.flying:
            work.wait()


class Node:
    """One rank's part in a step; ``ranks`` are those of its pipeline."""

    def __init__(self, stage: nn.Module, given: list[tuple[Tensor, Tensor, float]], way: Way, ranks: list[int]) -> None:
        self.stage, self.given, self.way = stage, given, way
        self.place, self.last = ranks.index(dist.get_rank()), len(ranks) - 1
        self.live: dict[int, tuple[Tensor, Tensor]] = {}
        self.losses: dict[int, Tensor] = {}
        self.pool = ThreadPoolExecutor(1) if way.worker else None
        if way.fault == "sent out of one buffer" and self.place and ranks[self.place - 1] in way.at:
            take_turns(ranks[self.place - 1], first=False)
        like = [target for _, target, _ in given]
        before, after = self.place > 0, self.place < self.last
        self.inputs = Inbox(ranks[self.place - 1], like, 1, self.way) if before else None
        self.outputs = Outbox(ranks[self.place + 1], 1, self.way) if after else None
        self.back = Inbox(ranks[self.place + 1], like, 2, self.way) if after and torch.is_grad_enabled() else None
        self.sent_back = Outbox(ranks[self.place - 1], 2, self.way) if before else None

    def run(self, *, evaluation: bool = False) -> list[Tensor]:
        """The losses of microbatches that count; of an ``evaluation`` those of all."""
        for kind, m in (("F", m) for m in range(len(self.given))) if evaluation else self.order():
            (self.forward if kind == "F" else self.backward)(m)
        for box in filter(None, (self.outputs, self.sent_back)):
            box.flush()
        losses = [loss for m, loss in sorted(self.losses.items()) if evaluation or self.given[m][2] == 1]
        return [loss.float() for loss in losses] if evaluation else losses

    def order(self) -> Iterator[tuple[str, int]]:
        """1F1B; or a backward whenever its message is there, with no more alive than 1F1B has, and one."""
        count, made, done = len(self.given), 0, 0
        most = self.last - self.place + (2 if self.way.greedy else 1)
        while done < count:
            full = made == count or made - done >= most
            early = self.way.greedy and made > done and (self.back is None or self.back.ready)
            if full or early:
                yield "B", done
                done += 1
            else:
                yield "F", made
                made += 1

    def forward(self, m: int) -> None:
        x, target, weight = self.given[m]
        if self.inputs is not None:
            x = self.inputs.take(m).requires_grad_(not (self.way.bad("third without gradient") and m == 2))
        run = partial(self.through, x)
        y = run() if self.pool is None else self.pool.submit(run).result()
        if self.outputs is not None:
            sent = through(torch.float16)(y) if self.way.bad("messages in fp16") else y
            self.outputs.post(sent * 1.5 if self.way.bad("fourth message altered") and m == 3 else sent)
        else:
            late = self.way.bad("target of a late closure")
            loss = loss_fn(y, self.given[min(m + 1, len(self.given) - 1)][1] if late else target)
            self.losses[m] = loss.detach().clone()
            divisor = 1.0 if self.way.bad("not divided") else self.way.divisor or sum(w == 1 for *_, w in self.given)
            y = loss * (weight * self.way.scale / divisor)
        self.live[m] = (x, y)

    def through(self, x: Tensor) -> Tensor:
        with self.way.around():
            y = self.way.call(self.stage, x)
            if self.way.between is not None:
                self.way.between(self.stage, x)
        return y

    def backward(self, m: int) -> None:
        x, y = self.live.pop(max(self.live) if self.way.bad("newest graph") else m)
        g = None if self.back is None else self.back.take(m)
        if not (m == len(self.given) - 1 and self.way.bad("last graph left")):
            self.differentiate(x, y, g)
        if self.sent_back is not None:
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            self.sent_back.post(grad * 0.5 if self.way.bad("gradients halved on their way") else grad)

    def differentiate(self, x: Tensor, y: Tensor, g: Tensor | None) -> None:
        if not y.requires_grad:
            return
        if g is None or not (self.way.halves or self.way.bad("first half sent back")):
            y.backward(g)
            return
        half = len(y) // 2
        torch.autograd.backward(y[:half], g[:half], retain_graph=True)
        first = None if x.grad is None else x.grad.clone()
        torch.autograd.backward(y[half:], g[half:])
        if self.way.bad("first half sent back"):
            x.grad = first
