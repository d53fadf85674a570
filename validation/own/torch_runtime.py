"""Cases on ``torch.distributed.pipelining``: a rank's part, with a training loop as users write it."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

from pipeproof.core.observe.observed import RankOperation
from pipeproof.core.observe.per_rank_globals import belongs_to_rank
from pipeproof.core.observe.posted_messages import note_messages
from pipeproof.own.case import Case
from pipeproof.own.data import data_for, max_norm_of, model_for
from pipeproof.own.runtimes import SINGLE, TORCH, TORCH_CLASSES, UNUSED
from pipeproof.own.stages import Slice, buffers_of, gradients_of, layers_of, parameters_of, tied_across
from pipeproof.pipeline.action import Action
from pipeproof.reference.data import Batch
from pipeproof.reference.model import Model
from pipeproof.reference.step import Recipe, objective
from pipeproof.whitebox.torch_pipelining import Recorder, run
from pipeproof.worlds.worker import RankContext

_Plant = Callable[["TorchRank"], None]


class TorchRank:
    """One rank in a torch pipeline."""

    def __init__(self, context: RankContext, case: Case) -> None:
        self.case, self.context = case, context
        pipeline, peers = groups(context.ranks, case.replicas)
        self.replica, self.place = divmod(context.rank, case.ranks)
        self._own = slice(self.replica * case.ranks, (self.replica + 1) * case.ranks)  # this replica's ranks
        self.model = model_for(case)
        self.modules = stage_modules(self.model, case, self.place, context.device)
        self.wrapped = dict(self.modules)
        for index, module in self.modules.items() if case.replicas > 1 else ():
            if any(p.requires_grad for p in module.parameters()):  # DDP refuses a module with nothing to train
                self.wrapped[index] = DistributedDataParallel(
                    module, process_group=peers, find_unused_parameters=case.model in UNUSED
                )
        self.loss_fn, _ = objective(self.model, data_for(case, 0), Recipe(loss=case.loss))
        self.divisor = 1.0  # for the current operation; torch divides by the microbatch count afterwards
        stages = [
            pipelining.PipelineStage(
                module, index, case.stages, torch.device(context.device), group=pipeline or context.group
            )
            for index, module in self.wrapped.items()
        ]
        self.schedule = build_schedule(case, stages, self._loss)
        self.recorder = Recorder(self.schedule)
        unique = {id(p): p for module in self.modules.values() for p in module.parameters()}
        self.parameters = [*unique.values()]
        self.optimizer = Recipe().optimizer([p for p in self.parameters if p.requires_grad])

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        value = self.loss_fn(output, target)
        return value if self.divisor == 1.0 else value / self.divisor

    def perform(self, operation: int) -> RankOperation:
        """Run one planned operation."""
        name, every = self.case.plan[operation], data_for(self.case, operation)
        _, divisor = objective(self.model, every, Recipe(loss=self.case.loss))
        self.divisor = divisor / self.case.late
        self.recorder.begin()
        own = self._run(name, [every[number].to(self.context.device) for number in self.case.share(self.replica)])
        rows = self._gather([loss.item() * self.divisor for loss in own])
        # The last stage alone has losses, and one device's total is over all replicas.
        losses, total = next(filter(None, rows[self._own]), []), [loss for row in rows for loss in row]
        observed: dict[str, Any] = {"called": tuple(self.recorder.called), "buffers": buffers_of(self.modules)}
        if unseen := self.recorder.fence.broken:
            observed["unseen"] = {"microbatches": unseen}
        if name != "accumulate":
            observed["loss"] = math.fsum(total) / divisor if all(map(math.isfinite, total)) else sum(total)
        if name == "train":
            observed["gradients"] = gradients_of(self.modules)
            observed["norm"] = self._update(max_norm_of(self.case, operation))
            observed["parameters"] = parameters_of(self.modules)
        return RankOperation(name, tuple(losses), tuple(self.recorder.executed), **observed)

    def _run(self, name: str, batches: list[Batch]) -> list[Tensor]:
        losses, options = list[Tensor](), dict[str, Any]()
        call = self.schedule.eval if name == "eval" else self.schedule.step
        if name == "accumulate" and "finalize_gradients" in inspect.signature(call).parameters:
            options["finalize_gradients"] = False
        for module in self.wrapped.values():
            module.train(name != "eval")
        with torch.set_grad_enabled(name != "eval"):
            if "whole" in self.case.options:
                whole = tuple(map(torch.cat, zip(*(batch.inputs for batch in batches), strict=True)))
                last = self.case.stages - 1 in self.modules
                target = torch.cat([batch.target for batch in batches]) if last else None
                call(*(whole if 0 in self.modules else ()), target=target, losses=losses, **options)
            else:
                run(call, self.schedule, [(batch.inputs, batch.target) for batch in batches], losses, **options)
        for module in self.wrapped.values():
            module.train()
        return losses

    def _update(self, max_norm: float) -> float:
        """Clip, step and clear. Returns the norm before clipping, over all ranks."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        squares = [torch.linalg.vector_norm(grad, dtype=torch.float64).item() ** 2 for grad in gradients]
        norm = math.sqrt(math.fsum(square for row in self._gather(squares)[self._own] for square in row))
        factor = max_norm / (norm + 1e-6)
        for grad in gradients if factor < 1.0 else ():
            grad.mul_(factor)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _gather(self, own: list[float]) -> list[list[float]]:
        rows: list[Any] = [None] * self.context.ranks
        dist.all_gather_object(rows, own, group=self.context.group)
        return rows


Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
_made: dict[tuple[int, int], Groups] = {}  # created once per rank: groups cannot be freed
belongs_to_rank(__name__, "_made", fresh=lambda _: {})


def groups(ranks: int, replicas: int) -> Groups:
    """Return this rank's pipeline, and its peers: ranks with the same stages in other replicas."""
    if replicas == 1:
        return None, None
    if (ranks, replicas) not in _made:
        size, rank = ranks // replicas, dist.get_rank()
        pipelines = [dist.new_group([*range(first, first + size)]) for first in range(0, ranks, size)]
        peers = [dist.new_group([*range(place, ranks, size)]) for place in range(size)]
        _made[ranks, replicas] = pipelines[rank // size], peers[rank % size]
    return _made[ranks, replicas]


def stage_modules(model: Model, case: Case, place: int, device: str) -> dict[int, nn.Module]:
    """Build the stages for rank ``place``, by index.

    A parameter tied between two of them is one object, as in user models.
    """
    own, layers = case.built.stages_of(place), layers_of(case.split)
    modules: dict[int, nn.Module] = {stage: Slice(model, layers[stage]).to(device) for stage in own}
    for copies in tied_across(model, case.split):
        (first, shared), *others = sorted(copies.items())
        for stage, name in others if copies.keys() <= modules.keys() else ():
            holder, _, leaf = name.rpartition(".")
            setattr(modules[stage].get_submodule(holder), leaf, modules[first].get_parameter(shared))
    return modules


def build_schedule(case: Case, stages: list[Any], loss_fn: Callable[..., Tensor]) -> Any:
    """Build torch's schedule object for this rank: a family's class, or its runtime with the case's actions.

    Option ``descending`` reverses microbatches.
    """
    options: dict[str, Any] = {"loss_fn": loss_fn, "scale_grads": "unscaled" not in case.options}
    if "defer-recv" in case.options:
        options["defer_pp_recv"] = True
    if case.runtime == TORCH:
        build = getattr(pipelining, TORCH_CLASSES[case.schedule])
        return build(stages[0] if case.schedule in SINGLE else stages, case.microbatches, **options)
    last, turned = case.microbatches - 1, "descending" in case.options

    def spell(action: Action) -> Any:
        microbatch = last - action.microbatch if turned else action.microbatch
        return schedules._Action.from_str(str(action._replace(microbatch=microbatch)))

    schedule = schedules._PipelineScheduleRuntime(stages, case.microbatches, **options)  # type: ignore[no-untyped-call]
    schedule._prepare_schedule_with_comms({rank: list(map(spell, row)) for rank, row in enumerate(case.built.ranks)})
    return schedule


def observe_torch(context: RankContext, case: Case, *, plant: _Plant = lambda rank: None) -> list[RankOperation]:
    """Run one rank's part of ``case`` on torch's runtime. ``plant`` prepares the rank first."""
    rank = TorchRank(context, case)
    plant(rank)
    with note_messages():
        return [rank.perform(operation) for operation in range(len(case.plan))]
