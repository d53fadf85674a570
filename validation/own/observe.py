"""Run a case on real ranks and collect results. Observers wrap parts of the step.

Replicas of a pipeline must all agree, and the first one is judged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.observe.fence import Fence, looking
from pipeproof.core.observe.observed import Claim, Observed, RankOperation
from pipeproof.core.observe.recorder import Recorder
from pipeproof.core.observe.recording import Site
from pipeproof.core.observe.wrappers import AroundGradients, AroundStage, Steps
from pipeproof.core.tolerance import error, same_bits
from pipeproof.own.case import Case
from pipeproof.own.data import data_for, max_norm_of, model_for
from pipeproof.own.faults import files_behind, read, specimen
from pipeproof.own.runtimes import OWN
from pipeproof.own.stages import Slice, buffers_of, gradients_of, layers_of, parameters_of, tied_across
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.boundary import Tensors
from pipeproof.pipeline.gradients import GradientWork
from pipeproof.pipeline.stage import Goal, Stage
from pipeproof.pipeline.step import Parts, PipelineSchedule
from pipeproof.pipeline.transport import DistributedTransport
from pipeproof.reference.model import Model
from pipeproof.reference.step import Recipe, objective
from pipeproof.worlds.accelerator import deterministic
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

# Waits within a step end before the world's bound, so that the rank itself reports its wait.
STEP_TIMEOUT_S = 30.0


class WatchedStage(AroundStage):
    """A stage that notes module calls and non-finite outputs."""

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner)
        self.fence = Fence()
        self._finite: list[tuple[Action, list[Tensor]]] = []
        self.called: list[tuple[Action, bool]] = []

    @property
    def nonfinite(self) -> tuple[Action, ...]:
        """Forwards with non-finite outputs. Read after the step: reading waits for the device."""
        return tuple(action for action, finite in self._finite if not all(map(bool, finite)))

    def begin(self) -> None:
        self._finite, self.called = [], []
        self.inner.begin()

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        # A plain forward hook leaves the graph alone, and sees calls unknown to a wrapper.
        hook = self.module.register_forward_pre_hook(self.fence.around(partial(self._note, microbatch)))
        try:
            outputs = self.inner.forward(microbatch, inputs, goal)
        finally:
            hook.remove()
        self._look_at(microbatch, outputs if goal is None else (self.losses[microbatch],))
        return outputs

    @looking
    def _look_at(self, microbatch: int, made: Tensors) -> None:
        finite = [tensor.detach().isfinite().all() for tensor in made if tensor.is_floating_point()]
        self._finite.append((Action(self.index, Kind.FORWARD, microbatch), finite))

    def _note(self, microbatch: int, module: nn.Module, _: object) -> None:
        training = any(part.training for part in module.modules())
        self.called.append((Action(self.index, Kind.FORWARD, microbatch), training))


class WatchedGradients(AroundGradients):
    """Gradient work that copies gradients between tied reduction and clipping."""

    def __init__(self, inner: GradientWork, stages: Sequence[Stage]) -> None:
        super().__init__(inner, stages)
        self.kept: dict[Site, Tensor | None] = {}

    def reduce_tied(self) -> None:
        self.inner.reduce_tied()
        self.kept = gradients_of(_modules(self.stages))


def observe(case: Case, world: World, *, record: bool = False) -> Observed:
    """Run ``case`` on ``world``'s ranks; ``record``: also copy all boundary tensors.

    Raises the world's errors: a rank failed, hung or is missing.
    """
    rows = world.run(observe_rank, case, record, *files_behind(case.specimen), ranks=case.processes)
    return as_one(case, [tuple(row) for row in rows])


def observe_rank(
    context: RankContext, case: Case, record: bool = False, *files: tuple[str, str]
) -> list[RankOperation]:
    """Run one rank's part of ``case``; a job for ``World.run``.

    ``record``: keep all boundary tensors. ``files``: they register specimens.
    """
    read(files)
    if case.runtime != OWN:
        from pipeproof.own.torch_runtime import observe_torch

        deterministic(context.device)
        return observe_torch(context, case)
    model, schedule = assemble(context, case)

    def watch(parts: Parts) -> Parts:
        stages = tuple(map(WatchedStage, parts.stages))
        return replace(parts, stages=stages, gradients=WatchedGradients(parts.gradients, stages))

    prepared = plant(case, schedule)
    recorder = Recorder() if record else None
    watched = (prepared.wrap(recorder.wrap) if recorder else prepared).wrap(watch)
    steps = specimen(case.specimen).drive(watched)
    started = parameters_of(_modules(watched.parts.stages))
    done = []
    for operation in range(len(case.plan)):
        observed = _perform(watched, steps, model, case, operation, device=context.device)
        done.append(replace(observed, recording=recorder.take()) if recorder else observed)
    return [replace(done[0], started=started), *done[1:]]


def assemble(context: RankContext, case: Case) -> tuple[Model, PipelineSchedule]:
    """Build the whole model, and this rank's end of the pipeline."""
    deterministic(context.device)
    model = model_for(case)
    own, layers = case.built.stages_of(context.rank), layers_of(case.split)
    modules: dict[int, nn.Module] = {stage: Slice(model, layers[stage]).to(context.device) for stage in own}
    recipe = Recipe(loss=case.loss)
    loss_fn, _ = objective(model, data_for(case, 0), recipe)
    trained = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    timeout_s = specimen(case.specimen).timeout_s or STEP_TIMEOUT_S
    transport = DistributedTransport(context.group, device=torch.device(context.device), timeout_s=timeout_s)
    schedule = PipelineSchedule(
        kind=case.run,
        n_microbatches=case.microbatches,
        stages=list(modules.values()),
        loss_fn=loss_fn,
        optimizer=recipe.optimizer(trained),
        pp_group=transport,
        tied=tied_across(model, case.split),
    )
    return model, schedule


def plant(case: Case, schedule: PipelineSchedule) -> PipelineSchedule:
    """Plant the case's specimen in the schedule's program and parts."""
    one = specimen(case.specimen)
    return schedule.wrap(lambda parts: one.plant(replace(parts, program=one.reorder(parts.program))))


def _perform(
    schedule: PipelineSchedule, steps: Steps, model: Model, case: Case, operation: int, *, device: str
) -> RankOperation:
    batches = data_for(case, operation)
    recipe = Recipe(loss=case.loss)
    _, divisor = objective(model, batches, recipe)
    # Schedules average over microbatches by default, so a mean needs no divisor.
    loss_divisor = None if case.loss == "mean" else divisor
    fed = specimen(case.specimen).feed(batches, schedule.parts)
    pairs = [(batch.inputs, batch.target) for batch in (batch.to(device) for batch in fed)]
    name, known = case.plan[operation], dict[str, Any]()
    losses: tuple[float, ...]
    if name == "accumulate":
        accumulated = steps.accumulate(pairs, loss_divisor=loss_divisor)
        losses = tuple(accumulated[m].item() for m in sorted(accumulated))
    elif name == "eval":
        evaluated = steps.eval_step(pairs, loss_divisor=loss_divisor)
        losses, known["loss"] = evaluated.losses, evaluated.loss
    else:
        result = steps.train_step(pairs, max_norm=max_norm_of(case, operation), loss_divisor=loss_divisor)
        gradients = schedule.parts.gradients
        assert isinstance(gradients, WatchedGradients), "the watcher is the outermost wrapper"
        losses, parameters = result.losses, parameters_of(_modules(gradients.stages))
        known = {"loss": result.loss, "gradients": gradients.kept, "norm": result.grad_norm}
        known |= {"parameters": parameters, "profile": result.profile}
    watched = [stage for stage in schedule.parts.stages if isinstance(stage, WatchedStage)]
    return RankOperation(
        name,
        losses,
        schedule.executed,
        **known,
        nonfinite=tuple(action for stage in watched for action in stage.nonfinite),
        called=tuple(call for stage in watched for call in stage.called),
        unseen=dict([("microbatches", stage.fence.broken) for stage in watched if stage.fence.broken][:1]),
        buffers=buffers_of(_modules(watched)),
    )


def _modules(stages: Sequence[Stage]) -> dict[int, nn.Module]:
    return {stage.index: stage.module for stage in stages}


def as_one(case: Case, rows: Sequence[Sequence[RankOperation]]) -> Observed:
    """Combine all ranks' results, with microbatches numbered over all replicas.

    Later replicas keep actions, claims and losses alone.
    """
    if case.replicas == 1:
        return Observed(case.built, tuple(map(tuple, rows)))
    ranks = []
    for rank, row in enumerate(rows):
        replica, place = divmod(rank, case.ranks)
        share, own = case.share(replica), list[RankOperation]()

        def renumber(action: Action, share: range = share) -> Action:
            return action._replace(microbatch=share[action.microbatch])

        for observed, first in zip(row, rows[place], strict=True):
            executed = tuple(map(renumber, observed.executed))
            called = tuple((renumber(action), training) for action, training in observed.called)
            numbered = replace(observed, executed=executed, called=called, share=tuple(share))
            if replica:
                claims = tuple(_claims(rank, observed, place, first))
                numbered = replace(numbered, gradients=None, parameters=None, buffers=None, claims=claims)
            own.append(numbered)
        ranks.append(tuple(own))
    return Observed(case.built, tuple(ranks))


def _claims(rank: int, observed: RankOperation, leader: int, first: RankOperation) -> Iterator[Claim]:
    """Yield claims that gradients, parameters and buffers equal the first replica's, bit for bit."""
    for what in ("gradients", "parameters", "buffers"):
        own: Mapping[Site, Tensor | None] = getattr(observed, what) or {}
        other: Mapping[Site, Tensor | None] = getattr(first, what) or {}
        for site in sorted({*own, *other}):
            one, wanted = own.get(site), other.get(site)
            if one is None or wanted is None:
                holds, difference = one is wanted, f"which has {'one' if one is None else 'none'}"
            elif not (holds := same_bits(one, wanted)):
                difference = f"relative error {error(one, wanted):.2g}"
            text = f"another {what.removesuffix('s')} than rank {leader}'s, {'' if holds else difference}"
            yield Claim("replicas", rank, site, holds, text, f"rank {leader}'s, bit for bit", leader)
