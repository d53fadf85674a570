"""A pipeline whose stages are all in this process, and a step of it that is held against itself."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.records.step_check import check_step
from pipeproof.wings.composed import StageByStage

MSE = nn.functional.mse_loss
TOKENS = [(torch.arange(12).reshape(3, 4) % (m + 2), torch.full((3, 4, 8), m / 4)) for m in range(3)]
DATA = [(torch.randn(4, 8, generator=torch.Generator().manual_seed(m)), torch.full((4, 8), m / 4)) for m in range(3)]
Sent = dict[tuple[int, int], list[tuple[int, Tensor]]]  # of an output, by stage and number: who got what
Back = Callable[[Any, Tensor, Tensor, Any], Any]  # a stage, what it was given and gave, and what flows back


@dataclass
class Job:
    """A pipeline whose stages are all here: microbatch after microbatch goes through it, and back.

    ``route``: the outputs that a stage gets, by stage and number; else all of the one before. ``more``: what it is
    called with besides. ``fault`` changes what comes in. ``late``: what gradients are divided by once they are summed,
    in place of the losses. ``trial``: a first call of the last stage, and its backward, tell shapes and no more.
    """

    stages: Sequence[nn.Module]
    data: Sequence[tuple[Any, Any]] = field(default_factory=lambda: DATA)
    loss_fn: Any = MSE
    route: Mapping[int, list[tuple[int, int]]] = field(default_factory=dict)
    more: Callable[[int, int], Mapping[str, Tensor]] = lambda stage, microbatch: {}
    fault: Callable[[int, int, list[Tensor]], list[Tensor]] = lambda stage, microbatch, given: given
    late: float | None = None
    trial: bool = False
    keep: float = 1.0  # how much of a gradient that comes from beyond the next stage
    cast: Callable[[bool], Any] = lambda of_loss: nullcontext()
    times: float = 1.0  # what losses are multiplied by before their backwards
    apart: Mapping[int, int] = field(default_factory=dict)  # by stage: how many backwards each gradient has of its own
    change: Callable[[], object] = lambda: None  # what happens to gradients at last
    by_stage: Mapping[int, Back] = field(default_factory=dict)  # how it goes back through these
    end: Callable[[Tensor, Any, Any], Any] | None = None  # how it begins: the last's input, its output, and the target

    def step(self) -> list[float]:
        """The losses."""
        if self.trial:
            x = torch.zeros(4, 8, requires_grad=True)
            torch.autograd.grad(self.stages[-1](x).sum(), x)
        losses = [self._train(m, *pair) for m, pair in enumerate(self.data)]
        for one in (one for stage in self.stages for one in stage.parameters()):
            if self.late is not None and one.grad is not None:
                one.grad.div_(self.late)
        self.change()
        return losses

    def divide(self, by: float, *stages: int) -> None:
        """Divide the gradients of these stages, or of all."""
        for stage in [self.stages[k] for k in stages] or self.stages:
            for one in stage.parameters():
                one.grad = None if one.grad is None else one.grad / by

    def norm(self) -> float:
        own = {id(one): one for stage in self.stages for one in stage.parameters() if one.grad is not None}
        dense = (one.grad.to_dense() if one.grad.is_sparse else one.grad for one in own.values())  # type: ignore[union-attr]
        return math.sqrt(sum(float(one.abs().double().square().sum()) for one in dense))

    def _train(self, m: int, x: Tensor, target: Any) -> float:
        made, came, sent = list[list[Tensor]](), list[list[Tensor]](), Sent()
        for k, stage in enumerate(self.stages):
            came.append([x] if not k else self._received(k, made, sent))
            with self.cast(False):
                output = stage(*self.fault(k, m, came[k]), **self.more(k, m))
            made.append([output] if isinstance(output, Tensor) else list(output))
        with self.cast(True):
            loss = output if self.loss_fn is None else self.loss_fn(output, target)
        if self.end is None:
            (loss * self.times / (len(self.data) if self.late is None else 1.0)).backward()
        else:
            self.end(came[-1][0], output, target)
        for k in reversed(range(len(made) - 1)):
            if k in self.by_stage:
                self.by_stage[k](self.stages[k], came[k][0], made[k][0], sent[k, 0][0][1].grad)
            else:
                self._back(k, made[k], sent)
        return loss.item()

    def _received(self, k: int, made: list[list[Tensor]], sent: Sent) -> list[Tensor]:
        given = []
        for of, number in self.route.get(k, [(k - 1, n) for n in range(len(made[k - 1]))]):
            one = made[of][number]
            given.append(one.detach().clone().requires_grad_(one.requires_grad))
            sent.setdefault((of, number), []).append((k, given[-1]))
        return given

    def _back(self, k: int, made: list[Tensor], sent: Sent) -> None:
        pairs = []
        for n, one in enumerate(made):
            flows = [
                g.grad * (self.keep if to > k + 1 else 1.0) for to, g in sent.get((k, n), ()) if g.grad is not None
            ]
            if k in self.apart and one.requires_grad:
                for flow in flows * self.apart[k]:
                    one.backward(flow, retain_graph=True)
            elif flows and one.requires_grad:
                pairs.append((one, torch.stack(flows).sum(0)))
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))


def checked(job: Job, *, given: Any = None, then: Callable[[], object] = lambda: None, **more: Any) -> Verdict:
    """The verdict on a step of ``job``, which must not notice it: ``more`` is what ``StageByStage`` is told.

    ``then``: what comes after it, as an optimizer's step.
    """
    torch.manual_seed(1)
    stages, data = dict(enumerate(job.stages)), job.data if given is None else given
    with check_step(stages, data, against=StageByStage(job.loss_fn, **more), rename=lambda s, n: f"{s}.{n}") as check:
        losses = job.step()
        drawn = [random.random(), numpy.random.rand(), float(torch.rand(()))]
        states = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
        check.gradients()
        assert states == (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()), drawn
        check.report(losses=losses, norm=job.norm())
        then()
    return check.verdict


def one_by_one(job: Job) -> list[Verdict]:
    """The verdicts on as many steps as there are stages, one of which alone is run again in each."""
    by, found = StageByStage(job.loss_fn, stages="one by one"), list[Verdict]()
    for _ in job.stages:
        with check_step(dict(enumerate(job.stages)), job.data, against=by, rename="{}.{}".format) as check:
            job.step()
            check.gradients()
        for one in (one for stage in job.stages for one in stage.parameters()):
            one.grad = None if one.requires_grad else one.grad
        found.append(check.verdict)
    return found


@dataclass
class OneByOne(Job):
    """Each output has a backward of its own, the first of each stage as often as ``often`` says."""

    often: int = 1

    def _back(self, k: int, made: list[Tensor], sent: Sent) -> None:
        for n, one in enumerate(made):
            for _ in range(self.often if n == 0 else 1):
                for _, came in sent[k, n]:
                    one.backward(came.grad, retain_graph=True)


class Layer(nn.Module):
    """A linear layer, and what ``then`` makes of its output and of what else comes in.

    ``of``: what it makes of all that comes in before its layer, in place of the first. ``plain``: without a layer.
    """

    def __init__(
        self,
        then: Callable[..., Any] = torch.tanh,
        *,
        of: Callable[..., Tensor] | None = None,
        trained: bool = True,
        plain: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.then = nn.Identity() if plain else nn.Linear(8, 8).requires_grad_(trained), then
        self.of, self.calls = of, 0

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        self.calls += 1
        if self.of is not None:
            return self.then(self.layer(self.of(x, *others)))
        return self.then(self.layer(x), *others, **named)


def summed(*given: Tensor) -> Tensor:
    return sum(given[1:], given[0])


def layers(*then: Callable[..., Any]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer(one) for one in then]


class Counted(Layer):
    """What it gives depends on how often it was called."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        return super().forward(x) * self.calls


class Words(nn.Module):
    """Embeds tokens, and their positions, if any are given."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 8, sparse=sparse), nn.Embedding(9, 8)

    def forward(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        found: Tensor = self.words(tokens)
        return found if places is None else found + self.places(places)
