"""Stages with replicas on other ranks: gradients are reduced once in a step, not in every backward.

Several microbatches are under way at a time, and a schedule may split a backward; neither DDP's reducer nor the hooks
of ``fully_shard`` can count on one backward after every forward. So DDP must not reduce at all, and its mean is formed
after the last backward. ``fully_shard`` reduces in hooks of its own, which only a whole backward runs: it does so in
the step's last one.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeproof.pipeline.boundary import Gradients, Tensors
from pipeproof.pipeline.gradients import GradientWork
from pipeproof.pipeline.stage import Goal, ModuleStage

_NOT_SPLIT = "the hooks of fully_shard reduce gradients in whole backwards only"


@runtime_checkable
class Sharded(Protocol):
    """A module after ``fully_shard``, recognised without its import."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None: ...

    def set_is_last_backward(self, is_last_backward: bool) -> None: ...


class ShardedStage(ModuleStage):
    """A stage with a ``fully_shard`` module: the last backward in a run reduces its gradients.

    Its first half does all of a split backward; ``undeferred`` says so.
    """

    def __init__(self, module: nn.Module, index: int, *, microbatches: int) -> None:
        super().__init__(module, index)
        self._microbatches = microbatches
        self._left = microbatches

    def begin(self) -> None:
        super().begin()
        self._left = self._microbatches

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._left -= 1
        assert isinstance(self.module, Sharded), "made for modules that are"
        self.module.set_requires_gradient_sync(self._left == 0)
        self.module.set_is_last_backward(self._left == 0)
        return super().backward(microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        self.undeferred[_NOT_SPLIT] = None
        return self.backward(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        """Do nothing: the first half did it."""


class ReplicatedStage(ModuleStage):
    """A stage with a module in DDP: each forward runs without preparing a reduction."""

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        assert isinstance(self.module, DistributedDataParallel), "made for modules that are"
        with self.module.no_sync():
            return super().forward(microbatch, inputs, goal)


class ReplicatedGradients:
    """Gradient work after a mean over replicas for every stage in DDP, as DDP forms it."""

    def __init__(self, inner: GradientWork, modules: Sequence[DistributedDataParallel]) -> None:
        self._inner = inner
        self._modules = modules

    def reduce_tied(self) -> None:
        for module in self._modules:
            _take_mean(module)
        self._inner.reduce_tied()

    def squares(self) -> list[float]:
        return self._inner.squares()

    def scale(self, factor: float) -> None:
        self._inner.scale(factor)


def stage_of(module: nn.Module, index: int, *, splits: bool, microbatches: int) -> ModuleStage:
    """Build the stage for ``module``, by its wrapper."""
    if isinstance(module, Sharded):
        return ShardedStage(module, index, microbatches=microbatches)
    if isinstance(module, DistributedDataParallel):
        return ReplicatedStage(module, index, splits=splits)
    return ModuleStage(module, index, splits=splits)


def with_replicas(inner: GradientWork, modules: Sequence[nn.Module]) -> GradientWork:
    """Wrap ``inner`` with a mean over replicas, if any of ``modules`` uses DDP."""
    replicated = [module for module in modules if isinstance(module, DistributedDataParallel)]
    return ReplicatedGradients(inner, replicated) if replicated else inner


def _take_mean(module: DistributedDataParallel) -> None:
    """Average gradients. A parameter without a gradient on some replicas gets one there; without any, none."""
    group, ignored = module.process_group, module.parameters_to_ignore
    parameters = [p for name, p in module.module.named_parameters() if p.requires_grad and name not in ignored]
    present = torch.tensor([float(p.grad is not None) for p in parameters], device=module.device)
    dist.all_reduce(present, group=group)
    for parameter, count in zip(parameters, present.tolist(), strict=True):
        if count:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient = gradient.detach().contiguous()  # a view of DDP's buckets may be among them
            dist.all_reduce(gradient, group=group)
            parameter.grad = gradient.div_(dist.get_world_size(group))
