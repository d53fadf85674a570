"""Steps of the asynchronous pipeline: reductions behind backwards, gathers before forwards, weights that come late."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from runtime_async import Node, Way, take_turns
from runtime_functional_training import Ranks, chunks_of, drawn_apart, with_pads
from torch import Tensor, nn
from truth_models import OPTIMIZERS, Pairs, observed, through

from pipeproof import StepResult


class Reducer:
    """Gradients of replicas, added up while backwards still run; ``main`` gradients take them over."""

    def __init__(self, stage: nn.Module, way: Way, ranks: Ranks) -> None:
        self.stage, self.way, self.ranks = stage, way, ranks
        self.trained = {n: p for n, p in stage.named_parameters() if p.requires_grad}
        self.kind = torch.bfloat16 if way.bad("main gradients in bf16") else torch.float32
        self.main = {n: torch.zeros(p.shape, dtype=self.kind) for n, p in self.trained.items()} if way.main else {}
        self.works: list[Any] = []
        self.counts = dict.fromkeys(self.trained, 0)
        self.total = 0
        for name, parameter in self.trained.items():
            if way.main == "parameter":
                parameter.main_grad = self.main[name]  # type: ignore[attr-defined]
            if not (way.bad("a bias without its hook") and name == list(self.trained)[1]):
                parameter.register_post_accumulate_grad_hook(partial(self.accumulated, name))
        if way.main == "module":
            stage.main_grads = self.main  # type: ignore[assignment]

    def accumulated(self, name: str, parameter: Tensor) -> None:
        """A backward gave a share of this one."""
        self.counts[name] += 1
        if self.main and parameter.grad is not None:
            if self.way.bad("copied over"):
                self.main[name].copy_(parameter.grad)
            else:
                self.main[name].add_(parameter.grad)
            if not self.way.bad("gradients left behind"):
                parameter.grad = None
        expected = self.total - (1 if self.way.bad("reduced before the last") else 0)
        if self.way.reduce == "hooks" and self.counts[name] == expected:
            self.works.append(self.reduce(self.gradient(name)))

    def gradient(self, name: str) -> Tensor:
        found = self.main[name] if self.main else self.trained[name].grad
        assert found is not None, "it was just accumulated"
        return found

    def reduce(self, gradient: Tensor) -> Any:
        group = self.ranks.of_pipeline if self.way.bad("reduced over the pipeline") else self.ranks.of_replicas
        if self.way.bad("reduced in bf16"):
            narrow = gradient.to(torch.bfloat16)
            dist.all_reduce(narrow, group=group)
            gradient.copy_(narrow)
            return None
        return dist.all_reduce(gradient, group=group, async_op=True)

    def begin(self, total: int) -> None:
        self.works, self.total, self.counts = [], total, dict.fromkeys(self.trained, 0)

    def finish(self) -> dict[str, Tensor]:
        """All reductions are there: the gradients by name."""
        hasty = next((r for r in self.ranks.replicas if r in self.way.at), None)
        hasty = hasty if self.way.fault == "reduction not waited for" else None
        if hasty is not None and hasty != dist.get_rank():
            take_turns(hasty, first=False)
        if self.way.replicas > 1 and not self.way.bad("never reduced"):
            ended = [n for n in self.trained if self.way.reduce == "end"]
            self.works += [self.reduce(self.gradient(n)) for n in ended]
            if self.way.bad("reduced again"):
                for work in self.works:
                    work.wait()
                self.works += [self.reduce(self.gradient(n)) for n in self.trained]
        early = {n: self.gradient(n).clone() for n in self.trained} if hasty == dist.get_rank() else {}
        for peer in self.ranks.replicas if early else ():
            if peer != dist.get_rank():
                take_turns(peer, first=True)
        for work in filter(None, self.works):
            work.wait()
        factor = self.way.scale * (1 if self.way.divisor else self.way.replicas)
        factor = factor / self.way.scale if self.way.bad("not scaled back") else factor
        found = early or {n: self.gradient(n) for n in self.trained}
        for gradient in found.values():
            gradient.div_(factor)
            if self.way.bad("stage doubled"):
                gradient.mul_(2)
            if self.way.bad("stage negated"):
                gradient.neg_()
        return found

    def clear(self) -> None:
        for name, parameter in self.trained.items():
            parameter.grad = None
            if self.main and not self.way.bad("main gradients not cleared"):
                self.main[name].zero_()


class Late:
    """Weights that are in their place only once a layer is called: gathered of parts, or written by a hook."""

    def __init__(self, stage: nn.Module, way: Way, ranks: Ranks) -> None:
        self.way, self.ranks = way, ranks
        self.layers = [layer for layer in stage.modules() if list(layer.parameters(recurse=False))]
        self.expected: dict[int, Any] = {}
        for k, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(partial(self.called, k))

    def release(self, before: list[Tensor]) -> None:
        """From now on layers have old weights, or none, until they are called."""
        for k, layer in enumerate(self.layers):
            flat = vector(layer)
            part = flat.chunk(len(self.ranks.replicas))[self.ranks.replicas.index(dist.get_rank())]
            old = before[k] if before else torch.zeros_like(flat)
            sent = old.chunk(len(self.ranks.replicas))[self.ranks.replicas.index(dist.get_rank())]
            part = sent if self.way.bad("gathered before the update") and before else part
            self.expected[k] = part if self.way.gathered else flat
            nn.utils.vector_to_parameters(old, layer.parameters())

    @torch.no_grad()
    def called(self, k: int, layer: nn.Module, given: Any) -> None:
        """Layer ``k`` is about to be called: its weights are waited for, and the next one's asked for."""
        for ahead in (k, k + 1):
            if self.way.gathered and isinstance(self.expected.get(ahead), Tensor):
                parts = [torch.empty_like(self.expected[ahead]) for _ in self.ranks.replicas]
                work = dist.all_gather(parts, self.expected[ahead], group=self.ranks.of_replicas, async_op=True)
                self.expected[ahead] = (work, parts)
        if (expected := self.expected.pop(k, None)) is None or (self.way.bad("late weights forgotten") and k == 0):
            return
        if not isinstance(expected, Tensor):
            expected[0].wait()
            expected = torch.cat(expected[1])
        nn.utils.vector_to_parameters(expected, self.layers[k].parameters())


def vector(layer: nn.Module) -> Tensor:
    """A copy of all weights of a layer."""
    return nn.utils.parameters_to_vector(layer.parameters()).detach().clone()


def clipped(found: dict[str, Tensor], way: Way, ranks: Ranks) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients under a bound, and the norm of all before."""
    own = sum((g.float().square().sum() for g in found.values()), torch.zeros(()))
    every = own.clone()
    dist.all_reduce(every, group=ranks.of_pipeline)
    norm = (own if way.bad("clipped by its own norm") else every).sqrt()
    times = (way.max_norm / (norm + 1e-6)).clamp(max=1.0) if way.max_norm else torch.ones(())
    return {n: g * times for n, g in found.items()}, every.sqrt()


def course(model: Any, operations: Iterable[tuple[str, Pairs]], *, way: Way, watched: bool) -> Iterator[StepResult]:
    """A run of operations."""
    ranks = Ranks(way.replicas)
    (cut,) = chunks_of(model, 1, ranks)
    stage, weight = observed(cut, watched), 0.5 if way.fault == "padding weighs half" else 0.0
    if way.bad("drawn apart"):
        drawn_apart(stage)
    optimizer = OPTIMIZERS[way.optimizer](stage) if way.optimizer else None
    reducer = Reducer(stage, way, ranks)
    weights = Late(stage, way, ranks) if way.late or way.gathered else None
    if weights is not None and way.gathered:
        weights.release([])
    for operation, microbatches in operations:
        stage.train(operation != "eval" or way.bad("evaluated in training mode"))
        if way.before is not None:
            way.before(stage, microbatches)
        if operation == "eval":
            with way.evaluation():
                losses = Node(stage, with_pads(microbatches, (), 0, 0.0), way, ranks.pipeline).run(evaluation=True)
            yield StepResult([stage], losses or None)
            continue
        given = with_pads(microbatches, way.pads, way.fill, weight)
        reducer.begin(len(given))
        losses = Node(stage, given, way, ranks.pipeline).run()
        if operation == "accumulate":
            yield StepResult([stage], losses or None, gradients=reducer.main or None)
            continue
        found = reducer.finish()
        bounded, norm = clipped(found, way, ranks)
        narrow = through(torch.float16) if way.bad("gradients through fp16") else torch.clone
        kept = {n: narrow(g) for n, g in found.items()}
        before = [vector(layer) for layer in weights.layers] if weights else []
        if optimizer is not None and not way.bad("update skipped"):
            for name, parameter in reducer.trained.items():
                parameter.grad = bounded[name].to(parameter.dtype)
            optimizer.step()
        made = StepResult([stage], losses or None, norm, gradients=kept, max_norm=way.max_norm or None)
        yield replace(made, loss_scale=way.scale) if way.scale != 1.0 else made
        if weights is not None:
            weights.release(before)
        reducer.clear()


def step(model: Any, microbatches: Pairs, **how: Any) -> StepResult:
    """One step."""
    return next(course(model, [("train", microbatches)], **how))
