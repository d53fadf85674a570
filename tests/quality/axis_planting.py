"""How faults are planted: what is right in the primitives is wrapped, for as long as a step runs.

None of the primitives has a keyword for it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from inspect import getattr_static
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from pipeproof.wings.primitives import experts, stacked
from pipeproof.wings.primitives.data_parallel import local

Plant = Callable[[], AbstractContextManager[object]]
Change = Callable[..., Any]  # what is in the place of what is right: a function of that and of what it is given
Chosen = Callable[[str], bool]  # of parameters, by name
Copies = Callable[[str, Any, DeviceMesh], float]  # by how many ranks a gradient is held
Done = Callable[[nn.Module, DeviceMesh], None]


def every(name: str) -> bool:
    return True


def replacement(right: Any, change: Change) -> Any:
    """``change`` with the signature of what is right, by which torch calls it."""
    return wraps(right)(lambda *given, **more: change(right, *given, **more))


def wrapped(owner: Any, name: str, change: Change) -> Plant:
    """``owner.name`` is ``change``."""
    static = isinstance(getattr_static(owner, name), staticmethod)

    def plant() -> AbstractContextManager[object]:
        made = replacement(getattr(owner, name), change)
        return patch.object(owner, name, staticmethod(made) if static else made)

    return plant


def in_part(key: str, **changes: Change) -> Plant:
    """Functions of the part ``key`` are ``changes``."""

    def plant() -> AbstractContextManager[object]:
        part = stacked.PARTS[key]
        made = {name: replacement(getattr(part, name), change) for name, change in changes.items()}
        return patch.object(stacked, "PARTS", {**stacked.PARTS, key: replace(part, **made)})

    return plant


def finished(key: str, also: Done) -> Plant:
    """``also`` comes after what finishes a step."""
    return in_part(key, finish=lambda right, stage, mesh: (right(stage, mesh), also(stage, mesh))[1])


def applied(key: str, also: Callable[[Any, DeviceMesh], None]) -> Plant:
    """``also`` is done to what a primitive was applied to."""

    def apply(right: Any, stage: nn.Module, mesh: DeviceMesh) -> Any:
        module = right(stage, mesh)
        also(module, mesh)
        return module

    return in_part(key, apply=apply)


def unless(chosen: Chosen) -> Change:
    """What finishes a step is given copies of ``chosen`` gradients."""

    def finish(right: Any, stage: nn.Module, mesh: DeviceMesh) -> None:
        hidden = {p: p.grad for name, p in stage.named_parameters() if chosen(name)}
        for parameter, gradient in hidden.items():
            parameter.grad = None if gradient is None else gradient.clone()
        right(stage, mesh)
        for parameter, gradient in hidden.items():
            parameter.grad = gradient

    return finish


def having(word: str) -> Chosen:
    return lambda name: word in name


def gradients(stage: nn.Module, chosen: Chosen = every) -> Iterator[Any]:
    """Those there are, each what this rank has of it."""
    for name, parameter in stage.named_parameters():
        if parameter.grad is not None and chosen(name):
            yield local(parameter.grad)


def times(factor: float, chosen: Chosen = every) -> Done:
    """``chosen`` gradients are multiplied; by the size of the axis, or one over it, where the factor is 0 or -1."""

    def multiply(stage: nn.Module, mesh: DeviceMesh) -> None:
        by = {0.0: float(mesh.size()), -1.0: 1 / mesh.size()}.get(factor, factor)
        for gradient in gradients(stage, chosen):
            gradient.mul_(by)

    return multiply


def summed(chosen: Chosen = every) -> Done:
    """``chosen`` gradients are summed over the axis, whatever they are."""

    def add(stage: nn.Module, mesh: DeviceMesh) -> None:
        for gradient in gradients(stage, chosen):
            dist.all_reduce(gradient, group=mesh.get_group())

    return add


def on(chosen: Chosen, *ranks: int) -> Chosen:
    """``chosen`` on these ranks alone."""
    return lambda name: dist.get_rank() in ranks and chosen(name)


def in_second_stage(change: Change) -> Change:
    """``change`` on the second half of all ranks."""
    return lambda right, *given: (
        change(right, *given) if dist.get_rank() >= dist.get_world_size() // 2 else right(*given)
    )


class Times(torch.autograd.Function):
    """Nothing, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        return given[0] * ctx.factor, None


def norm(
    stage: nn.Module,
    mesh: DeviceMesh,
    *,
    chosen: Chosen = every,
    copies: Copies | None = None,
    alone: bool = False,
) -> float:
    """The root of the sum of squares of ``chosen`` gradients of all ranks, each divided by its ``copies``."""
    square = torch.zeros((), dtype=torch.float64)
    for name, parameter in stage.named_parameters():
        if parameter.grad is not None and chosen(name):
            gradient = whole_or_shard(parameter.grad)
            square += local(gradient).double().square().sum() / (copies or held_by)(name, gradient, mesh)
    if not alone:
        dist.all_reduce(square)
    return math.sqrt(square.item())


def whole_or_shard(gradient: Any) -> Any:
    """Partial sums added up."""
    if not isinstance(gradient, DTensor) or not any(one.is_partial() for one in gradient.placements):
        return gradient
    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])


def held_by(name: str, gradient: Any, mesh: DeviceMesh) -> float:
    """How many ranks have the same."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
    ranks = math.prod(size for axis, size in sizes.items() if axis != "pp")
    if isinstance(gradient, DTensor):
        own = gradient.device_mesh
        parts = math.prod(own.size(k) for k, one in enumerate(gradient.placements) if isinstance(one, Shard))
        return ranks / parts
    return ranks / sizes.get("ep", 1) if experts.is_expert(name) else ranks


def other_norm(**how: Any) -> Plant:
    """The norm is formed otherwise."""
    return wrapped(stacked, "norm_of", lambda right, stages, mesh, in_parts: norm(stages[0], mesh, **how))


def as_if_of(ranks: float) -> Copies:
    """Each is counted as if so many had it."""
    return lambda name, gradient, mesh: ranks


def held_by_lines(axis: str) -> Copies:
    """What ranks along ``axis`` have alike counts for each of them."""

    def counted(name: str, gradient: Any, mesh: DeviceMesh) -> float:
        cut = isinstance(gradient, DTensor) and any(isinstance(one, Shard) for one in gradient.placements)
        return held_by(name, gradient, mesh) / (1 if cut else mesh[axis].size())

    return counted


def by_ranks(right: Any, stages: Sequence[nn.Module], mesh: DeviceMesh, in_parts: object) -> float:
    """Each rank's root in fp32 first."""
    own = torch.tensor(norm(stages[0], mesh, alone=True)).square()
    dist.all_reduce(own)
    return float(own.sqrt())


NORMS: Mapping[str, Plant] = {
    "norm over the world": other_norm(copies=as_if_of(1.0)),
    "norm of each rank, twice": other_norm(copies=as_if_of(0.25), alone=True),
    "norm of each rank": other_norm(copies=as_if_of(1.0), alone=True),
    "norm without experts": other_norm(chosen=lambda name: not experts.is_expert(name)),
    "norm counts copies along tp": other_norm(copies=held_by_lines("tp")),
    "norm takes shards for copies": other_norm(copies=lambda name, gradient, mesh: float(dist.get_world_size())),
}
SOUND_NORMS: Mapping[str, Plant] = {
    "norm of ranks' norms": wrapped(stacked, "norm_of", by_ranks),
}
