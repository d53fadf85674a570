"""Steps of the functional pipeline: reductions, updates and what is handed back, all of them values."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from runtime_functional import Line, Way, Weights, added
from runtime_plain import exchange
from torch import Tensor, nn
from truth_models import Pairs, observed, through

from pipeproof import StepResult
from pipeproof.whitebox import FlatShard


class Ranks:
    """Where this rank is: ``place`` along its pipeline, and the groups of that and of its replicas."""

    def __init__(self, replicas: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        lines = [list(range(r, size, replicas)) for r in range(replicas)]
        stages = [list(range(k, k + replicas)) for k in range(0, size, replicas)]
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in (*lines, *stages)} if replicas > 1 else {}
        self.pipeline, self.replicas = lines[rank % replicas], stages[rank // replicas]
        self.of_pipeline = groups.get(tuple(self.pipeline))
        self.of_replicas = groups.get(tuple(self.replicas))
        self.place = rank // replicas


class Cut(list[nn.Module]):
    """The chunks of this rank, where they are cut already."""


def chunks_of(model: Any, chunks: int, ranks: Ranks) -> Cut:
    """The layers of each chunk of this rank."""
    if isinstance(model, Cut):
        return model
    each = len(model) // (len(ranks.pipeline) * chunks)
    first = [each * (c * len(ranks.pipeline) + ranks.place) for c in range(chunks)]
    return Cut(model[k : k + each] for k in first)


def drawn_apart(module: nn.Module) -> None:
    """This rank begins with another weight than its replicas."""
    torch.manual_seed(99)
    with torch.no_grad():
        next(p for p in module.parameters() if p.dim() == 2).normal_()


def with_pads(pairs: Pairs, pads: tuple[int, ...], fill: int, weight: float) -> list[tuple[Any, Tensor, float]]:
    """Microbatches and what each weighs: those of padding stand at ``pads``, and fill up to ``fill``."""
    given = [(x, target, 1.0) for x, target in pairs]
    for place in pads:
        given.insert(place, (*pairs[0], weight))
    return given + [(*pairs[0], weight)] * (fill - len(given))


def reduced(sums: Weights, line: Line, ranks: Ranks) -> Weights:
    """The mean over replicas, or the sum, of one vector."""
    if not sums:
        return sums
    flat = torch.cat([g.flatten() for _, g in sorted(sums.items())])
    group = ranks.of_pipeline if line.way.bad("reduced over the pipeline") else ranks.of_replicas
    if line.way.replicas > 1 and not line.way.bad("never reduced"):
        flat = flat.to(torch.bfloat16) if line.way.bad("reduced in bf16") else flat
        dist.all_reduce(flat, group=group)
        flat = flat.float()
        if line.way.bad("reduced twice"):
            dist.all_reduce(flat, group=group)
        flat = flat if line.way.divisor or line.way.bad("not averaged") else flat / line.way.replicas
    if line.way.bad("vector cut in another order"):
        flat = flat.roll(1)
    parts = flat.split([g.numel() for _, g in sorted(sums.items())])
    whole = {n: part.view(g.shape) for part, (n, g) in zip(parts, sorted(sums.items()), strict=True)}
    return added(whole, {n: g / line.way.replicas for n, g in line.late.items()})


def shared(sums: Weights, line: Line, tied: tuple[str, str] | None) -> Weights:
    """With the other share of a weight that the first and the last stage have."""
    ends = {0: len(line.ranks) - 1, len(line.ranks) - 1: 0}
    if tied is None or line.place not in ends or line.way.fault == "tied not summed":
        return sums
    name = tied[line.place > 0]
    both = exchange(sums[name], line.ranks[ends[line.place]])
    return {**sums, name: 2 * both if line.way.bad("tied sum doubled") else both}


def norm_of(sums: Weights, line: Line, ranks: Ranks, tied: tuple[str, str] | None) -> Tensor:
    """The norm of all gradients of a pipeline; a shared weight counts once."""
    others = [g for n, g in sums.items() if tied is None or n != tied[1]]
    own = sum((g.double().square().sum() for g in others), torch.zeros((), dtype=torch.float64))
    squares = own.clone()
    dist.all_reduce(squares, group=ranks.of_pipeline)
    return (own if line.way.bad("norm of its own") else squares).sqrt()


def updated(weights: Weights, sums: Weights, state: dict[str, Any], way: Way) -> tuple[Weights, dict[str, Any]]:
    """New weights, and a new state of the optimizer."""
    if way.optimizer == "sgd":
        return {n: w - way.rate * sums[n] for n, w in weights.items()}, state
    if way.optimizer == "momentum":
        state = {n: 0.9 * state[n] + g if n in state else g for n, g in sums.items()}
        return {n: w - way.rate * state[n] for n, w in weights.items()}, state
    count = state.get("count", 0) + 1
    means = {n: 0.9 * state.get("means", {}).get(n, 0.0) + 0.1 * g for n, g in sums.items()}
    squares = {n: 0.999 * state.get("squares", {}).get(n, 0.0) + 0.001 * g * g for n, g in sums.items()}
    down = {n: (squares[n] / (1 - 0.999**count)).sqrt() + 1e-8 for n in weights}
    made = {n: w - way.rate / 10 * means[n] / (1 - 0.9**count) / down[n] for n, w in weights.items()}
    return made, {"count": count, "means": means, "squares": squares}


def handed(line: Line, ranks: Ranks, sums: Weights, losses: list[Tensor], norm: Tensor | None) -> StepResult:
    """What the way to hand back is."""
    made = StepResult(list(line.modules), losses[::-1] if line.way.bad("losses reversed") else losses or None, norm)
    made = replace(made, max_norm=line.way.max_norm or None)
    if line.way.scale != 1.0:
        made = replace(made, loss_scale=line.way.scale)
    if line.way.handed == "written":
        for name, parameter in (p for module in line.modules for p in module.named_parameters()):
            parameter.grad = sums.get(name)
        return made
    if line.way.handed == "all":
        return replace(made, gradients=sums)
    flat, at, parts = torch.cat([g.flatten() for g in sums.values()]), 0, dict[str, Any]()
    half = flat.numel() // len(ranks.replicas)
    low = half * ranks.replicas.index(dist.get_rank())
    for name, g in sums.items():
        first, last = max(at, low), min(at + g.numel(), low + half)
        if first < last:
            parts[name] = FlatShard(flat[first:last].clone(), first - at)
        at += g.numel()
    alone = line.way.handed == "flat alone"
    return replace(made, modules=[] if alone else made.modules, gradients=parts)


def course(
    model: Any,
    operations: Iterable[tuple[str, Pairs]],
    *,
    way: Way,
    watched: bool,
    tied: tuple[str, str] | None = None,
) -> Iterator[StepResult]:
    """A run of operations; ``tied`` are the names of one weight in the first and in the last stage."""
    ranks = Ranks(way.replicas)
    modules = [observed(one, watched) for one in chunks_of(model, way.chunks, ranks)]
    if way.bad("drawn apart"):
        drawn_apart(modules[0])
    weight = 0.5 if way.fault == "padding weighs half" else 0.0
    weights = tuple({n: p.detach().clone() for n, p in one.named_parameters() if p.requires_grad} for one in modules)
    buffers = tuple({n: b.clone() for n, b in one.named_buffers()} for one in modules)
    state, before, nothing = dict[str, Any](), weights, tuple({} for _ in modules)
    sums: tuple[Weights, ...] = nothing
    for number, (operation, microbatches) in enumerate(operations):
        training = operation != "eval"
        given = with_pads(microbatches, way.pads if training else (), way.fill if training else 0, weight)
        line = Line(way, tuple(modules), weights, buffers, given, ranks.pipeline)
        line = replace(line, weights=before) if line.way.bad("weights of the step before") else line
        if way.around is not None:
            way.around(modules[0], microbatches)
        for module in modules:
            module.train(training or line.way.bad("evaluated in training mode"))
        if not training:
            yield StepResult(list(modules), line.evaluated() or None)
            continue
        sums, losses = line.run(sums)
        written(modules, {} if line.way.bad("statistics lost") else buffers)
        if operation == "accumulate":
            yield handed(line, ranks, _all(sums), losses, None)
            continue
        whole = shared(reduced(_all(sums), line, ranks), line, tied)
        scale = 1.0 if line.way.bad("not scaled back") else way.scale
        whole = {n: changed(line, n, g / scale) for n, g in whole.items()}
        norm, clipped = norm_of(whole, line, ranks, tied), whole
        if way.max_norm:
            own = torch.stack([g.square().sum() for g in whole.values()]).sum().sqrt()
            used = own if line.way.bad("clipped by its own norm") else norm
            clipped = {n: g * (way.max_norm / (used + 1e-6)).clamp(max=1.0).float() for n, g in whole.items()}
        if way.optimizer and not line.way.bad("update skipped"):
            state = {} if number and line.way.bad("state forgotten") else state
            before, (new, state) = weights, updated(_all(weights), clipped, state, way)
            weights = tuple({n: new[n] for n in one} for one in weights)
            written(modules, weights)
        yield handed(line, ranks, whole, losses, norm if way.norm else None)
        sums = sums if line.way.bad("sums of the step before") else nothing


def changed(line: Line, name: str, g: Tensor) -> Tensor:
    """A gradient, spoilt where that is the fault."""
    if line.way.bad("gradients negated"):
        return -g
    if line.way.bad("square gradients transposed") and g.dim() == 2 and g.shape[0] == g.shape[1]:
        return g.T.contiguous()
    if line.way.bad("biases zeroed") and name.endswith("bias"):
        return torch.zeros_like(g)
    return through(torch.float16)(g) if line.way.bad("gradients through fp16") else g


def _all(trees: Iterable[Weights]) -> Weights:
    return {n: g for tree in trees for n, g in tree.items()}


@torch.no_grad()
def written(modules: Iterable[nn.Module], trees: Any) -> None:
    """The modules have these weights, or buffers."""
    for module, tree in zip(modules, trees, strict=False):
        known = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in tree.items():
            known[name].copy_(tensor)


def step(model: Any, microbatches: Pairs, **how: Any) -> StepResult:
    """One step."""
    return next(course(model, [("train", microbatches)], **how))
