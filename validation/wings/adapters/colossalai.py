"""ColossalAI: a step of a pipeline that pipeproof starts, or one of a running job.

A user's step boosts its model as ever and calls ``booster.execute_pipeline`` and ``optimizer.step`` inside
``observed``. The reference is made of the same model and criterion. Nothing of ColossalAI is imported before one of
these is called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_record import Pairs
from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox.handed_back import FlatShard, Gradient
from pipeproof.whitebox.validator import WhiteBox
from pipeproof.wings.adapters import adapter
from pipeproof.wings.adapters.adapter import Adapter
from pipeproof.wings.adapters.colossalai_chunks import stages_of, told_apart
from pipeproof.wings.adapters.colossalai_whole import COLOSSALAI, Criterion, check_model, cut, rows_in, whole_of
from pipeproof.wings.adapters.drawn import Drawn
from pipeproof.wings.adapters.framework import AdapterError, around
from pipeproof.wings.adapters.recording import StepRecording
from pipeproof.wings.adapters.sight import Observation
from pipeproof.wings.adapters.step import FrameworkStep, Sight, telling
from pipeproof.wings.adapters.whole import Called, Whole

__all__ = ["ColossalAIError", "check_step", "imports", "observed", "record_step", "validate"]

ColossalAIError = AdapterError
imports = COLOSSALAI.imports

_COVERED = {
    "tp_size": 1,
    "sp_size": 1,
    "enable_sequence_parallelism": False,
    "cpu_offload": False,
    "use_fp8": False,
}
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}  # what the plugin casts a model to


def observed(
    booster: Any, model: Any, optimizer: Any, microbatches: Sequence[Any], reference: nn.Module
) -> AbstractContextManager[Observation]:
    """Observe the batch that is trained inside this, from the weights of ``reference``.

    booster, model, optimizer: as ``execute_pipeline`` is called with them. microbatches: as the step is given them.
    What this gives has a ``data_iterator`` of the batch that they are cut from, to hand to ``execute_pipeline``. Raises
    ``ColossalAIError`` for what is not covered.
    """
    return adapter.observed(ColossalAI(booster, model, optimizer, batches=1), microbatches, reference)


def validate(
    step: Callable[[Any, list[Any]], Any],
    *,
    reference: Callable[[], nn.Module],
    criterion: Criterion,
    microbatches: Sequence[Any],
    ranks: int | Mapping[str, int],
    dtype: torch.dtype | None = None,
    whitebox: WhiteBox | None = None,
) -> Verdict:
    """The verdict on ``step(reference, microbatches)``, which trains a boosted model inside ``observed``.

    reference: builds the whole model, seeded, as it is before it is boosted. criterion: as ``execute_pipeline`` is
    given it. microbatches: as the pipeline cuts them from a batch: dicts, tuples or tensors, of as many rows each, for
    all replicas. ranks: how many, all of one pipeline; or ``{"dp": 2, "pp": 2}``. dtype: what the plugin casts the
    model to. whitebox: whose ranks to use, as pytest's fixture; None: own ones.

    Raises ``ColossalAIError``, and what ``whitebox.validate`` raises.
    """
    COLOSSALAI.module()
    COLOSSALAI.check_dtype(dtype)
    whole = whole_of(reference, criterion, COLOSSALAI.listed(microbatches), dtype)
    return adapter.validate(COLOSSALAI, step, whole, ranks=ranks, whitebox=whitebox)


def check_step(
    booster: Any,
    model: Any,
    optimizer: Any,
    criterion: Criterion,
    batches: Sequence[Any] | None,
    *,
    reference: Callable[[], nn.Module] | StepExpectation,
    timeout_s: float = 300.0,
) -> AbstractContextManager[CheckedStep]:
    """A context manager around ``execute_pipeline`` and ``optimizer.step`` of a running job. Every rank enters it.

    booster, model, optimizer, criterion: as ``execute_pipeline`` is called with them. batches: what its data iterator
    gives in the step, of this rank's replica: one; or where gradients are accumulated, one for each call. None on a
    rank that does not have them, and not on rank 0. reference: builds the whole model, as it is before it is boosted;
    or a ``Composed``, for a model too large for one device: the ranks of the first and of the last stage then have
    batches, and there is one. All else is as for ``deepspeed.check_step``.
    """
    own = ColossalAI(booster, model, optimizer, criterion, count_of(batches))
    return adapter.check_step(own, batches, reference=reference, timeout_s=timeout_s)


def record_step(
    booster: Any, model: Any, optimizer: Any, batches: Sequence[Any] | None, path: str, *, timeout_s: float = 300.0
) -> AbstractContextManager[StepRecording]:
    """A context manager around one step of a running job, which writes what the step gave into the file at ``path``.

    booster, model, optimizer, batches: as for ``check_step``; the record has the microbatches that are cut from them.
    All else is as for ``deepspeed.record_step``.
    """
    own = ColossalAI(booster, model, optimizer, batches=count_of(batches))
    return adapter.record_step(own, batches, path, timeout_s=timeout_s)


def count_of(batches: Any) -> int | None:
    """How many there are, where that can be known."""
    return len(batches) if isinstance(batches, Sequence) else None


@dataclass(frozen=True)
class ColossalAI(Adapter):
    """What ``execute_pipeline`` is called with, and for how many batches in a step; None: nothing says it."""

    booster: Any
    model: Any
    optimizer: Any
    criterion: Any = None
    batches: int | None = None
    framework = COLOSSALAI
    given_as = "batches"

    def step(self) -> FrameworkStep:
        self._check_covered()
        plugin, module = self.booster.plugin, self.model.module
        stages = stages_of(plugin.stage_manager, module)
        losses, runs, drawn = list[Tensor](), list[str](), Drawn()

        def gradients() -> dict[nn.Parameter, Gradient]:
            if self.batches not in (None, len(runs)):
                raise AdapterError(
                    f"execute_pipeline was called {len(runs)} times before optimizer.step, and the check was given "
                    f"{self.batches} batch{'es' * (self.batches != 1)}: let both be the same"
                )
            return self._gradients()

        return FrameworkStep(
            stages,
            lambda stage, name: COLOSSALAI.in_whole(name),
            gradients,
            lambda: losses,
            partial(self._watching, stages, (losses, runs, drawn)),
            unfinished=AdapterError("optimizer.step was not called in the block: let the block call it"),
            drawn=drawn,
            accumulation=self._accumulation(),
        )

    def load(self, step: FrameworkStep, microbatches: Sequence[Any], reference: nn.Module) -> Iterator[Any]:
        plugin = self.booster.plugin
        COLOSSALAI.expect("the reference", reference, Called, "the model that validate gave to the step")
        packed: Any = reference.packed
        tensors = [packed.pack(one) for one in microbatches]
        rows = rows_in("microbatch 0", tensors[0]) if tensors else 0
        COLOSSALAI.expect_count("the plugin's num_microbatches", told_count(plugin.scheduler), len(tensors))
        COLOSSALAI.expect_count("the plugin's microbatch_size", plugin.scheduler.microbatch_size, rows, "rows")
        if plugin.dp_axis > plugin.pp_axis and plugin.dp_size > 1:  # whitebox.validate numbers ranks otherwise
            raise AdapterError(
                f"dp_outside is False: {COLOSSALAI.adapter}.validate covers True only, the default; set it so for the "
                "check"
            )
        COLOSSALAI.check_types(self.model.module, reference, "the model is boosted to")
        COLOSSALAI.load(step.parameters(), reference)
        self.optimizer.update_master_params(self.model)
        joined = [torch.cat(parts) for parts in zip(*tensors, strict=True)]
        return iter([packed.unpack(joined)])

    def whole(self, reference: Callable[..., Any], microbatches: Sequence[Any]) -> Whole:
        plugin = self.booster.plugin
        replica = int(plugin.pg_mesh.coordinate(plugin.dp_axis))
        dtype = _PRECISIONS[plugin.precision]
        whole = whole_of(reference, self.criterion, [*self.cut(microbatches)], dtype, replica=replica)

        def contract(_: nn.Module, every: Pairs) -> Contract:
            return Contract(loss_divisor=len(every) / len(microbatches))  # each call divides by its own

        return replace(whole, contract=contract)

    def against_itself(self, by: StepExpectation, microbatches: Sequence[Any]) -> tuple[StepExpectation, Pairs]:
        if len(microbatches) > 1:
            raise AdapterError(f"batches has {len(microbatches)}: expected one, where a step is held against itself")
        if self.model.shared_params and by.build is None:
            raise AdapterError(
                "the model shares weights among stages, and nothing tells by which names: give Composed a build=, "
                "which makes the model as it is before it is boosted, on the meta device"
            )
        every = [*self.cut(microbatches)]
        whole = whole_of(by.build or nn.Identity, self.criterion, every)
        build = None if by.build is None else whole.build
        pairs = [(inputs, one) for (inputs, _), one in zip(whole.pairs, every, strict=True)]
        return by.in_framework({}, loss_fn=self.criterion, build=build), pairs

    def cut(self, microbatches: Sequence[Any]) -> Iterator[Any]:
        """What the schedule cuts from batches."""
        scheduler = self.booster.plugin.scheduler
        for batch in COLOSSALAI.listed(microbatches, what=self.given_as) if microbatches else ():
            yield from cut(batch, told_count(scheduler), scheduler.microbatch_size)

    def _check_covered(self) -> None:
        """Raise for what would be judged wrongly."""
        place = COLOSSALAI.module("booster.plugin.hybrid_parallel_plugin")
        plugin: Any = getattr(self.booster, "plugin", None)
        optimizers = [getattr(place, f"HybridParallel{kind}Optimizer") for kind in ("Naive", "AMP", "Zero")]
        for what, one, kinds in (
            ("the booster's plugin", plugin, [place.HybridParallelPlugin]),
            ("the model", self.model, [place.HybridParallelModule]),
            ("the optimizer", self.optimizer, optimizers),
        ):
            if type(one) not in kinds:
                raise AdapterError(
                    f"{what} is a {type(one).__name__}: {COLOSSALAI.adapter} covers what HybridParallelPlugin boosts"
                )
        if plugin.scheduler is None:
            raise AdapterError("pp_size is 1: there is no pipeline; give the plugin a pp_size above 1 for the check")
        COLOSSALAI.covers(vars(plugin), _COVERED)
        if plugin.precision not in _PRECISIONS:
            raise AdapterError(
                f"precision is {plugin.precision}: {COLOSSALAI.adapter} covers fp32 and bf16; set it so for the check"
            )
        communication = {"fp8_communication": plugin.shard_config.fp8_communication}
        COLOSSALAI.covers(communication, {"fp8_communication": False})
        check_model(self.model.module)

    def _accumulation(self) -> Accumulation | None:
        """What is in bf16 is added up in it. Copies of a shared weight are reduced, and then replicas, with ZeRO in
        another type where it is told one."""
        if _PRECISIONS[self.booster.plugin.precision] is None:
            return None
        return Accumulation(between=getattr(self.optimizer, "_communication_dtype", None), tied_first=True)

    def _gradients(self) -> dict[nn.Parameter, Gradient]:
        """Those that the optimizer is about to take, where they are; with ZeRO each replica keeps a part of its own."""
        found = [one for one in self.model.module.parameters() if one.requires_grad]
        zero = hasattr(self.optimizer, "pid_to_grad_store")
        return {one: _sharded(one, self.optimizer) if zero else one.grad for one in found}

    @contextmanager
    def _watching(
        self, stages: Mapping[int, nn.Module], notes: tuple[list[Tensor], list[str], Drawn], sight: Sight
    ) -> Iterator[None]:
        """While this is open, note losses and data, tell ``sight`` of the optimizer's step, and the norm."""
        (losses, runs, drawn), plugin, optimizer = notes, self.booster.plugin, self.optimizer

        def noted(run: Any, model: Any, data_iter: Any, criterion: Criterion, *more: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                runs.append("run")
                data_iter, criterion = drawn.noting(data_iter), _noting(criterion, losses)
            return run(model, data_iter, criterion, *more, **named)

        with ExitStack() as stack:
            stack.enter_context(around(plugin.scheduler, "forward_backward_step", noted))
            stack.enter_context(around(optimizer, "step", telling(sight, lambda _: optimizer.get_grad_norm())))
            stack.enter_context(told_apart(plugin.stage_manager, self.model.module, stages))
            yield


def _sharded(parameter: nn.Parameter, optimizer: Any) -> Gradient:
    """What this rank has of a gradient with ZeRO: equal parts of the flattened whole, of which the last are padded."""
    store = optimizer.pid_to_grad_store[id(parameter)]
    group = next(k for k, every in optimizer._working_param_groups.items() if any(one is parameter for one in every))
    parts = store.get_partitioned_gradients_by_param_id(group, id(parameter))
    if not parts:
        return None
    part: Tensor = parts[store.local_rank].detach()
    if store.world_size == 1:
        return part.flatten()[: parameter.numel()].view_as(parameter)
    start = part.numel() * store.local_rank
    rest = parameter.numel() - start
    return FlatShard(part.flatten()[:rest], start) if rest > 0 else FlatShard(None)


def _noting(criterion: Criterion, losses: list[Tensor]) -> Criterion:
    """``criterion``, noting every loss before the schedule divides it."""

    @wraps(criterion)
    def noted(outputs: Any, microbatch: Any) -> Tensor:
        loss = criterion(outputs, microbatch)
        losses.append(loss.detach().clone())
        return loss

    return noted


def told_count(scheduler: Any) -> int | None:
    """How many microbatches it was told to cut a batch into, if it was; its classes have two names for it."""
    count: int | None = getattr(scheduler, "num_microbatches", getattr(scheduler, "num_microbatch", None))
    return count
