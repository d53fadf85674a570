"""Ways to call a stage, and whole steps, that are unusual and right: what public runtimes do."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from runtime_plain import PLAINEST, How, exchange, own, step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from truth_layers import writes
from truth_models import Block, Chain, Pairs, observed

from pipeproof import StepResult, watch

Step = Callable[..., Any]


def plain(**how: Any) -> Step:
    """The plain runtime in one of its many ways."""
    return partial(step, how=How(**how))


# Ways to call a stage.


def recomputed(reentrant: bool) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
    def call(stage: nn.Module, given: tuple[Any, ...]) -> Any:
        given = tuple(x if x.requires_grad or not reentrant else x.detach().requires_grad_() for x in given)
        return checkpoint(stage, *given, use_reentrant=reentrant)

    return call


def in_evaluation(stage: nn.Module, given: tuple[Any, ...]) -> Any:
    if dist.get_rank() == 1:
        stage.eval()
    return stage(*given)


# What else a step does.


@torch.no_grad()
def measured(stage: nn.Module, given: tuple[Any, ...]) -> None:
    stage.eval()
    stage(*given)
    stage.train()


def measured_with_graph(stage: nn.Module, given: tuple[Any, ...]) -> None:
    stage(*(x.detach() for x in given))


def shapes_of_zeros(stage: nn.Module, pairs: Pairs) -> None:
    with torch.no_grad():
        stage(torch.zeros_like(pairs[0][0]))


def warmed_up(stage: nn.Module, pairs: Pairs) -> None:
    stage(torch.ones_like(pairs[0][0])).sum().backward()
    stage.zero_grad()


def zeros_first(stage: nn.Module, pairs: Pairs) -> None:
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)


def flat_gradients(stage: nn.Module, pairs: Pairs) -> None:
    """Gradients are views of one buffer from the start."""
    parameters = list(stage.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view(parameter.shape)


def with_hooks(stage: nn.Module, pairs: Pairs) -> None:
    for parameter in stage.parameters():
        parameter.register_hook(lambda gradient: gradient.clone())
    stage.register_forward_hook(lambda module, given, made: None)


# Steps of their own.


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def handed_by_name(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """A mapping of names to clones, taken before gradients are clipped."""
    stage, losses = step(model, pairs, watched=watched)
    names = names_of(model)
    made = {names[id(p)]: p.grad.clone() for p in stage.parameters()}
    torch.nn.utils.clip_grad_norm_(stage.parameters(), 1e-3)
    return made, losses


def main_gradients(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """bf16 parameters; their gradients are added up in fp32, and handed back as what they were computed in."""
    stage, names = own(model), names_of(model)
    main = {id(p): torch.zeros(p.shape) for p in stage.parameters()}

    def taken(parameter: Tensor) -> None:
        assert parameter.grad is not None, "it was just accumulated"
        main[id(parameter)] += parameter.grad.float()
        parameter.grad = None

    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(taken)
    _, losses = step(model, pairs, watched=watched, stage=stage)
    return {names[key]: gradient for key, gradient in main.items()}, losses


def whole_loss(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """Every rank reports the mean of all losses."""
    stage, losses = step(model, pairs, watched=watched)
    mean = torch.stack(losses).mean() if losses else torch.zeros(())
    dist.broadcast(mean, dist.get_world_size() - 1)
    return StepResult(stage, mean)


def first_block_watched(model: Any, pairs: Pairs, *, watched: bool, alone: bool) -> Any:
    """Of each stage its first layer is watched; ``alone``, or as well as the stage."""
    if watched:
        watch(model[2 * dist.get_rank()])
    return step(model, pairs, watched=watched and not alone)


def second_step(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """The step that is judged is the second one; the first has moved nothing."""
    stage, _ = step(model, pairs, watched=False)
    stage.zero_grad()
    return step(model, pairs, watched=watched, stage=stage)


class Renamed(nn.Module):
    """A stage whose layers have names of their own."""

    def __init__(self, stage: nn.Sequential) -> None:
        super().__init__()
        self.first, self.rest = stage[0], stage[1:]

    def forward(self, x: Tensor) -> Any:
        return self.rest(self.first(x))


def renamed(model: Any, pairs: Pairs, *, watched: bool, copied: bool = False) -> Any:
    """``copied``: a stage made anew, into which the weights are loaded."""
    stage = own(model)
    if copied:
        stage = Chain(*(Block() for _ in stage))
        for new, old in zip(stage, own(model), strict=True):
            new.load_state_dict(old.state_dict())
    return step(model, pairs, watched=watched, stage=Renamed(stage))


def weights_stored(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """The reference's layers, with backwards that write the weights' gradients themselves."""
    for number, layer in enumerate(model):
        model[number] = writes(layer.linear)
    return step(model, pairs, watched=watched)


class Head(nn.Module):
    """The last block, with a copy of the first one's weight that has a name of its own."""

    def __init__(self, block: Block, copy: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.shared_weight, self.bias = block.norm, copy, block.linear.bias

    def forward(self, x: Tensor) -> Any:
        return x + nn.functional.gelu(nn.functional.linear(self.norm(x), self.shared_weight, self.bias))


def in_the_reference(name: str) -> str:
    """What the names of ``Head`` are in the reference."""
    return {"7.shared_weight": "7.linear.weight", "7.bias": "7.linear.bias"}.get(name, name)


def tied_copies(model: Any, pairs: Pairs, *, renamed: bool = False, **how: Any) -> Any:
    """The first and the last stage have a copy of one weight each, and add both gradients."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    weight = model[0].linear.weight
    if rank == last:
        weight = nn.Parameter(weight.detach().clone())
        if renamed:
            model[-1] = Head(model[-1], weight)
        else:
            model[-1].linear.weight = weight
    stage, losses = step(model, pairs, **how)
    if rank in (0, last):
        weight.grad = exchange(weight.grad, last - rank)
    return stage, losses


def all_share_a_block(model: Any, pairs: Pairs, *, watched: bool) -> Any:
    """One block is every layer of every stage; all ranks add their gradients."""
    stage, losses = step(model, pairs, watched=watched)
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad)
    return stage, losses


def replicated(model: Any, pairs: Pairs, *, watched: bool, by: str = "hand") -> Any:
    """Two pipelines of two stages: ranks 0 and 2, and 1 and 3; replicas are ranks 0 and 1, 2 and 3.

    ``by``: "hand"; "ddp"; or "shards", where each replica keeps one half of the rows of every gradient, as a
    reduce-scatter leaves it.
    """
    rank = dist.get_rank()
    stage = model[4 * (rank // 2) :][:4]
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    module, how = observed(stage, watched), PLAINEST
    if by == "ddp":
        module = DistributedDataParallel(module, process_group=group)
        how = replace(how, order="naive", call=last_synchronised(len(pairs)))
    _, losses = step(model, pairs, how=how, watched=False, stage=module, ranks=[rank % 2, rank % 2 + 2])
    if by == "ddp":
        return stage, losses
    names, parts = names_of(model), {}
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= 2
        half = len(parameter) // 2
        rows = slice(half * (rank % 2), half * (rank % 2 + 1))
        parts[names[id(parameter)]] = (parameter.grad[rows].clone(), rows)
    return parts if by == "shards" else stage, losses


def last_synchronised(count: int) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
    """DDP is called with a reduction in the last backward alone."""
    calls = iter(range(count))

    def call(module: DistributedDataParallel, given: tuple[Any, ...]) -> Any:
        if next(calls) < count - 1:
            with module.no_sync():
                return module(*given)
        return module(*given)

    return call
