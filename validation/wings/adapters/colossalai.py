"""ColossalAI: a pipeline step, started by pipeproof or in a running job.

A user's step boosts its model as ever and calls ``booster.execute_pipeline`` and ``optimizer.step`` inside ``observe``.
The reference is made of the same model and criterion. Nothing of ColossalAI is imported before one of these is called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from pipeproof.wings.adapters.colossalai_whole import (
    COLOSSALAI,
    Criterion,
    check_model,
    cut,
    rows_in,
    stages_of,
    tell_chunks_apart,
    whole_of,
)
from pipeproof.wings.adapters.framework import AdapterError, around
from pipeproof.wings.adapters.recording import StepRecording
from pipeproof.wings.adapters.step import Drawn, FrameworkStep, Observation, Sight, telling
from pipeproof.wings.adapters.whole import Called, Whole

__all__ = ["ColossalAIError", "check_step", "imports", "observe", "record_step", "validate"]

ColossalAIError = AdapterError
imports = COLOSSALAI.imports

_COVERED = {
    "tp_size": 1,
    "sp_size": 1,
    "enable_sequence_parallelism": False,
    "cpu_offload": False,
    "use_fp8": False,
    "fp8_communication": False,
}
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}  # what the plugin casts a model to


def observe(
    booster: Any, model: Any, optimizer: Any, microbatches: Sequence[Any], reference: nn.Module
) -> AbstractContextManager[Observation]:
    """Observe the batch trained in this block, from weights of ``reference``.

    booster, model, optimizer: arguments of ``execute_pipeline``. microbatches: the step's. The result has a
    ``data_iterator`` for ``execute_pipeline``, with the batch that they are cut from. Raises ``ColossalAIError`` for
    unsupported use.
    """
    return adapter.observe(ColossalAI(booster, model, optimizer, batches=[microbatches]), microbatches, reference)


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
    """The verdict on ``step(reference, microbatches)``, which trains a boosted model inside ``observe``.

    reference: builds the whole model, seeded, before boosting. criterion: as for ``execute_pipeline``. microbatches:
    cut from a batch as by the pipeline: dicts, tuples or tensors with equally many rows, for all replicas. ranks: how
    many, all of one pipeline; or ``{"dp": 2, "pp": 2}``. dtype: the plugin's type for the model. whitebox: whose ranks
    to use, as pytest's fixture; None: own ones.

    Raises ``ColossalAIError``, and what ``whitebox.validate`` raises.
    """
    COLOSSALAI.module()
    COLOSSALAI.check_dtype(dtype)
    whole = whole_of(reference, criterion, COLOSSALAI.list_microbatches(microbatches), dtype)
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

    booster, model, optimizer, criterion: arguments of ``execute_pipeline``. batches: items of its data iterator in the
    step, for this rank's replica: one; with accumulation, one for each call. None on ranks without them; rank 0 must
    have them. reference: builds the whole model, before boosting; or a ``StageByStage``, for a model too large for one
    device: ranks with the first or last stage then have the batch, a single one. Otherwise like
    ``deepspeed.check_step``.
    """
    own = ColossalAI(booster, model, optimizer, criterion, batches)
    return adapter.check_step(own, batches, reference=reference, timeout_s=timeout_s)


def record_step(
    booster: Any, model: Any, optimizer: Any, batches: Sequence[Any] | None, path: str, *, timeout_s: float = 300.0
) -> AbstractContextManager[StepRecording]:
    """Record one step of a running job in this block, into the file at ``path``.

    booster, model, optimizer, batches: as for ``check_step``; the record has microbatches cut from them. Otherwise like
    ``deepspeed.record_step``.
    """
    own = ColossalAI(booster, model, optimizer, batches=batches)
    return adapter.record_step(own, batches, path, timeout_s=timeout_s)


@dataclass(frozen=True)
class ColossalAI(adapter.Adapter):
    """Arguments of ``execute_pipeline``, and the batches of a step; None: unknown."""

    booster: Any
    model: Any
    optimizer: Any
    criterion: Any = None
    batches: Any = None
    framework = COLOSSALAI
    given_as = "batches"

    def step(self) -> FrameworkStep:
        self._check_covered()
        plugin, module = self.booster.plugin, self.model.module
        stages = stages_of(plugin.stage_manager, module)
        losses, runs, drawn = list[Tensor](), list[str](), Drawn()

        def gradients() -> dict[nn.Parameter, Gradient]:
            if isinstance(self.batches, Sequence) and (count := len(self.batches)) != len(runs):
                raise AdapterError(
                    f"execute_pipeline was called {len(runs)} times before optimizer.step, and the check was given "
                    f"{count} batch{'es' * (count != 1)}: let both be the same"
                )
            found = [one for one in module.parameters() if one.requires_grad]
            zero = hasattr(self.optimizer, "pid_to_grad_store")  # each replica keeps a part
            return {one: _local_shard(one, self.optimizer) if zero else one.grad for one in found}

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
        COLOSSALAI.expect_count("the plugin's num_microbatches", count_option(plugin.scheduler), len(tensors))
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
                "the model shares weights among stages, and nothing tells by which names: give StageByStage a build=, "
                "which makes the model as it is before it is boosted, on the meta device"
            )
        every = [*self.cut(microbatches)]
        whole = whole_of(by.build or nn.Identity, self.criterion, every)
        build = None if by.build is None else whole.build
        pairs = [(inputs, one) for (inputs, _), one in zip(whole.pairs, every, strict=True)]
        return by.in_framework({}, loss_fn=self.criterion, build=build), pairs

    def cut(self, microbatches: Sequence[Any]) -> Iterator[Any]:
        """Cut batches into microbatches like the schedule."""
        scheduler = self.booster.plugin.scheduler
        for batch in COLOSSALAI.list_microbatches(microbatches, what=self.given_as) if microbatches else ():
            yield from cut(batch, count_option(scheduler), scheduler.microbatch_size)

    def _check_covered(self) -> None:
        """Raise for unsupported use."""
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
        COLOSSALAI.covers({**vars(plugin), "fp8_communication": plugin.shard_config.fp8_communication}, _COVERED)
        if plugin.precision not in _PRECISIONS:
            raise AdapterError(
                f"precision is {plugin.precision}: {COLOSSALAI.adapter} covers fp32 and bf16; set it so for the check"
            )
        check_model(self.model.module)

    def _accumulation(self) -> Accumulation | None:
        """Return the types of accumulation for bf16: tied copies are reduced before replicas; ZeRO may set a type."""
        if _PRECISIONS[self.booster.plugin.precision] is None:
            return None
        return Accumulation(between=getattr(self.optimizer, "_communication_dtype", None), tied_first=True)

    @contextmanager
    def _watching(
        self, stages: Mapping[int, nn.Module], notes: tuple[list[Tensor], list[str], Drawn], sight: Sight
    ) -> Iterator[None]:
        """Note losses and data, and notify ``sight`` of the optimizer's step and the norm, while open."""
        (losses, runs, drawn), plugin, optimizer = notes, self.booster.plugin, self.optimizer

        def note(run: Any, model: Any, data_iter: Any, criterion: Criterion, *more: Any, **named: Any) -> Any:
            @wraps(criterion)
            def noting(outputs: Any, microbatch: Any) -> Tensor:
                loss = criterion(outputs, microbatch)
                losses.append(loss.detach().clone())  # before the schedule divides it
                return loss

            if not torch.is_grad_enabled():
                return run(model, data_iter, criterion, *more, **named)
            runs.append("run")
            return run(model, drawn.noting(data_iter), noting, *more, **named)

        with (
            around(plugin.scheduler, "forward_backward_step", note),
            around(optimizer, "step", telling(sight, lambda _: optimizer.get_grad_norm())),
            tell_chunks_apart(plugin.stage_manager, self.model.module, stages),
        ):
            yield


def _local_shard(parameter: nn.Parameter, optimizer: Any) -> Gradient:
    """Return this rank's shard with ZeRO: equal parts of the flattened gradient, padded at the end."""
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


def count_option(scheduler: Any) -> int | None:
    """Return the configured number of microbatches in a batch, if set; the option has two names."""
    count: int | None = getattr(scheduler, "num_microbatches", getattr(scheduler, "num_microbatch", None))
    return count
