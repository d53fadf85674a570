"""Recorder of a job's steps for a comparison of two runs: each rank writes its own file.

It sends no messages, draws no random numbers, and writes to no gradient or weight: the job's bits stay the same.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pipeproof.core.observe.computed_in import ComputedIn
from pipeproof.core.observe.shards import Shard, ShardError, local_tensor, shard_of
from pipeproof.core.observe.sketch import Sketch, brief
from pipeproof.core.verdict import describe_error
from pipeproof.pipeline.step import Parts
from pipeproof.records.as_given import gradients_of, losses_of, number, optimizers_of, require_names, stages_of
from pipeproof.records.checked_step import look_at
from pipeproof.records.rank_part import RankStages, Rename, own_name
from pipeproof.records.record import RecordError, content_digests
from pipeproof.reference.step import dense
from pipeproof.reference.unsharded import is_flat, let_go
from pipeproof.whitebox.task import show
from pipeproof.wings.runs.file import Options, RankFile, RankHeader, RankParameter, RankStep
from pipeproof.worlds.side_store import rank_in_job

_LETTERS = 32  # of a microbatch's digest
_HOW = ("params", "foreach", "fused", "capturable", "differentiable")  # no hyperparameters: how a step is computed


class RunStep:
    """One step of a run, a context manager around it, made by ``record_run(...).step``."""

    def __init__(self, run: "RunRecorder", step: RankStep | None, microbatches: Sequence[object] | None) -> None:
        self._run, self._step, self._given = run, step, microbatches
        self._hooks: list[RemovableHandle] = []
        self._computed = ComputedIn(run.own.modules.values() if step and not run.computed else ())

    def __enter__(self) -> Self:
        self._note(self._begin)
        return self

    def gradients(self, named: Mapping[str, Tensor | None] | None = None) -> None:
        """Keep this rank's gradients now: complete, and before clipping.

        ``named``: gradients by the whole model's names, for a runtime that keeps them outside ``.grad``. Without this
        call, the optimizer's clipped gradients are kept.
        """
        self._note(lambda _: self._gradients(named))

    def report(
        self, *, losses: Sequence[float] | None = None, loss: float | None = None, norm: float | None = None
    ) -> None:
        """Keep this rank's reports: microbatches' losses in order; their total; the norm."""
        self._note(lambda _: self._numbers(losses, {"loss": loss, "norm": norm}))

    def wrap(self, parts: Parts) -> Parts:
        """As ``CheckedStep.wrap``."""
        return look_at(parts, self.gradients)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._computed.__exit__(kind, error, trace)
        if error is None:
            self._note(self._end)
        if self._step is not None:
            self._run.end(self._step, whole=error is None)

    def _note(self, look: Callable[[RankStep], Mapping[str, object]]) -> None:
        """Keep the fields returned by ``look``, or its error, which must not end a job."""
        if self._step is None or self._step.problem:
            return
        try:
            found = look(self._step)
        except RecordError as error:
            found = {"problem": str(error)}
        except Exception as error:  # all types: a job may pass anything
            found = {"problem": f"recording it raised {describe_error(error)}"}
        self._step = replace(self._step, **found)  # type: ignore[arg-type]  # fields by their names

    def _begin(self, _: RankStep) -> Mapping[str, object]:
        own = self._run.own
        there = {id(one) for module in own.modules.values() for one in module.parameters()}
        for address, name in own.names.items():
            if address not in there and name not in own.shards:
                cure = "call record_run once parameters are those that will be trained"
                raise RecordError(f"{name} is another tensor than when recording began: {cure}")
        for name, one in own.parameters.items():
            if tuple(one.shape) != (lengths := self._run.header.parameters[name].shard.lengths):
                raise RecordError(f"{name} has shape {list(one.shape)}, and had {list(lengths)} when recording began")
        self._computed.__enter__()
        self._hooks = [one.register_step_pre_hook(self._before_update) for one in self._run.optimizers]
        left, now, after = self._run.left, self._run.sketches(), self._run.after
        self._run.left = now
        moved = {name: one for name, one in now.items() if one is not left.get(name)}
        if self._given is None:
            return {"before": moved, "after": after}
        if not isinstance(self._given, Sequence) or isinstance(self._given, str):
            raise RecordError(f"microbatches is {show(self._given)}: expected a list of them")
        digests = tuple(one[:_LETTERS] for one in content_digests(self._given))
        return {"before": moved, "after": after, "microbatches": digests}

    def _before_update(self, *_: object) -> None:
        """Note the options before an optimizer's step, and clipped gradients if none were kept."""
        self._note(lambda step: {} if step.gradients else {**self._gradients(None), "clipped": True})
        self._note(lambda _: {"options": self._run.options()})

    def _end(self, step: RankStep) -> Mapping[str, object]:
        run = self._run
        run.left, run.computed = run.sketches(), run.computed or self._computed.narrowest
        return {"weights": run.left, "options": step.options or run.options(), "computed": run.computed}

    def _gradients(self, named: Mapping[str, Any] | None) -> dict[str, object]:
        own, parameters = self._run.own, self._run.header.parameters
        found = own.gradients if named is None else gradients_of(named, own.parameters)
        kept: dict[str, Sketch | None] = {}
        lying: dict[str, Shard] = {}
        for name, gradient in found.items():
            if not isinstance(gradient, Tensor | None):
                expected = "expected the tensor that this rank has, or None"
                raise RecordError(f"the gradient of {name} is {show(gradient)}: {expected}")
            kept[name] = None
            if gradient is None:
                continue
            weight, here = parameters[name].shard, local_tensor(gradient)
            try:  # without asking others to align it with its weight
                at = shard_of(gradient) or weight
            except ShardError as error:
                raise RecordError(f"the gradient of {name} cannot be kept: {error}") from None
            if (shape := tuple(here.shape)) != at.lengths or at.shape != weight.shape:
                other = f"has shape {list(shape)}, and the weight {list(at.lengths)}"
                raise RecordError(f"the gradient of {name} {other}")
            kept[name] = brief(dense(here), at=at)
            lying |= {} if at == weight else {name: at}
        return {"gradients": kept, "lying": lying, "clipped": False}

    def _numbers(self, losses: Sequence[float] | None, known: Mapping[str, float | None]) -> dict[str, object]:
        numbers: dict[str, object] = {what: number(what, one) for what, one in known.items() if one is not None}
        if losses is not None:
            numbers["losses"] = found = tuple(losses_of(losses))
            if self._given is not None and len(found) != len(self._given):
                raise RecordError(f"losses has {len(found)} numbers, and there are {len(self._given)} microbatches")
        return numbers


class RunRecorder:
    """The result of ``record_run``: a context manager around a job's steps on this rank."""

    def __init__(self, own: RankStages, optimizers: Sequence[Optimizer], header: RankHeader, path: Path) -> None:
        self.own, self.optimizers, self.header = own, optimizers, header
        self.left: dict[str, Sketch] = {}
        self.after: int | None = None  # the step with these weights, if written
        self.computed = ""  # the type that modules compute in, once that was observed
        self._path, self._stopped = path, False
        self._next: int | None = 0

    def __enter__(self) -> Self:
        return self

    def step(self, microbatches: Sequence[object] | None = None, *, number: int | None = None) -> RunStep:
        """Return a context manager around one step; its methods add values that cannot be observed.

        microbatches: those that this rank's replica trains in the step, in any form; only digests of their tensors are
        kept. None on ranks without them. number: the step's, from 0, by which two runs are compared; the default is the
        next, but a job resumed from a checkpoint must give it.
        """
        at = self._next if number is None else number
        if not isinstance(at, int) or at < 0:
            why = ", as the run goes on from a checkpoint" if number is None else ""
            raise RecordError(f"number is {show(at)}: expected that of the step, from 0{why}")
        self._next = at + 1
        if self.after is not None and at <= self.after:  # made anew, perhaps with other weights
            self.left, self.after = {}, None
        expected = at % self.header.every == 0 and not self._stopped
        return RunStep(self, RankStep(at) if expected else None, microbatches)

    def begin(self, *, resume: bool) -> Self:
        """Begin or resume the file. Raises ``RecordError`` on failure."""
        try:
            if resume and self._path.exists():
                there, same = RankFile(self._path), ("ranks", "every", "parameters")
                if any(getattr(there.header, what) != getattr(self.header, what) for what in same):
                    cure = "name a new folder"
                    raise RecordError(f"{self._path} is of a job with other ranks, parameters or every=: {cure}")
                with self._path.open("r+b") as file:
                    file.truncate(there.size)  # without a torn line
                self._next = None  # ranks may have come to other steps before a job was stopped
                return self
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("x") as file:
                file.write(self.header.line())
        except FileExistsError as error:
            cure = "name a new folder, or say resume=True to go on in this one"
            raise RecordError(f"{self._path} is there already: {cure}") from error
        except OSError as error:
            cure = "choose a writable folder"
            raise RecordError(f"cannot write {self._path}: {error.strerror or error}; {cure}") from error
        return self

    def sketches(self) -> dict[str, Sketch]:
        """Return a sketch of each parameter, reusing those of unchanged ones."""
        return {
            name: brief(one, at=self.header.parameters[name].shard, known=self.left.get(name))
            for name, one in self.own.parameters.items()
        }

    def options(self) -> Options:
        """Return the optimizers' current options by parameter: learning rate, weight decay and other numbers."""
        found: dict[str, dict[str, object]] = {}
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            values = {name: _plain(value) for name, value in group.items() if name not in _HOW}
            options = {name: value for name, value in values.items() if value is not None}
            found |= {self.own.names[id(one)]: options for one in group["params"] if id(one) in self.own.names}
        return found

    def end(self, step: RankStep, *, whole: bool) -> None:
        """Append the step's line to the file, if ``whole``. On failure, warn once; the job goes on."""
        if step.problem or not whole:
            self.left, self.after = {}, None  # the next line has all weights that it begins with
        if not whole:
            return
        if step.problem:
            warnings.warn(f"step {step.number} was not recorded: {step.problem}", stacklevel=3)
            step = RankStep(step.number, problem=step.problem)
        try:
            with self._path.open("a") as file:
                file.write(step.line(self.header))
            self.after = None if step.problem else step.number
        except OSError as error:
            self._stopped = True
            warnings.warn(f"steps from {step.number} on are not recorded: {error}", stacklevel=3)

    def __exit__(self, *_: object) -> None:
        self._stopped = True


def record_run(
    modules: nn.Module | Mapping[int, nn.Module],
    to: str | Path,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    rename: Rename = own_name,
    every: int = 1,
    resume: bool = False,
) -> RunRecorder:
    """Record a training loop for later comparison, as a context manager. Every rank enters it.

    Its ``step`` goes around each step of the loop. Of that is kept: digests of the microbatches, losses, the gradient
    norm, the optimizer's options, and of each gradient and each updated weight a digest, a norm and eight projections:
    about 250 bytes a parameter, however large it is. ``pipeproof compare`` says at which step two runs part, and by
    what. Each rank writes ``rank-N.jsonl`` into the folder ``to``, and what several keep of parts of a parameter adds
    up to what one keeps of all of it.

    modules: as of ``check_step``. optimizer: this rank's, or several: their learning rates and so on are kept. rename:
    as of ``check_step``. every: keep one step of so many. resume: go on in the folder of a job that was stopped; steps
    that are made anew take the place of those that were there.

    Raises ``RecordError`` for invalid arguments, and for a folder with another run. Later problems are warnings, and
    the job goes on.
    """
    rank, ranks = rank_in_job()
    stages = stages_of(modules, rank)
    for module in stages.values():
        flat = filter(is_flat, module.modules())
        if any(getattr(part.sharding_strategy, "name", "") != "NO_SHARD" for part in flat):
            raise RecordError("modules is in FullyShardedDataParallel, whose parameters are flat: use fully_shard")
        let_go(module)
    own = RankStages(stages, require_names(rename))
    own.check_names()
    optimizers = optimizers_of(optimizer)
    if not isinstance(every, int) or every < 1:
        raise RecordError(f"every is {show(every)}: expected how many steps there are to one that is kept, from 1")
    header = RankHeader(rank, ranks, {name: _parameter(own, name) for name in own.parameters}, every)
    return RunRecorder(own, optimizers, header, Path(to) / f"rank-{rank}.jsonl").begin(resume=resume)


def _parameter(own: RankStages, name: str) -> RankParameter:
    """Return a parameter's header entry. Raises ``RecordError`` if its part is unknown."""
    if is_lazy(one := own.parameters[name]):
        raise RecordError(f"{name} has no shape yet: run the model once before it is recorded")
    try:
        shard = own.shards.get(name)
    except ShardError as error:
        raise RecordError(f"a parameter cannot be kept: {error}") from None
    if shard is not None and shard.addend[1] > 1:
        raise RecordError(f"{name} is Partial, one of {shard.addend[1]} addends: expected Shard or Replicate")
    bounds = () if shard is None else shard.bounds
    return RankParameter(own.places[name], own.shapes[name], str(one.dtype).removeprefix("torch."), bounds)


def _plain(value: Any) -> object:
    """Return a numeric option, or several; otherwise None."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        parts = [_plain(one) for one in value]
        return None if None in parts else parts
    return value if isinstance(value, int | float | str) else None
