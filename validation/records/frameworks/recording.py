"""The record of one step that a framework ran, on all ranks together: what it gave, by the names of the whole model."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeproof.foreign.frameworks.framework import Framework
from pipeproof.foreign.frameworks.framework_step import TWO_STEPS, FrameworkStep
from pipeproof.foreign.handed_back import FlatShard, Gradient
from pipeproof.foreign.reference_run import WhiteBoxError
from pipeproof.judging.measured import versions
from pipeproof.judging.verdict import raised
from pipeproof.observers.shards import held_whole
from pipeproof.records.rank_part import Arrival, Run, places_of, run_of, told
from pipeproof.records.record import Record, RecordedOperation, RecordError, digest
from pipeproof.records.record_file import write
from pipeproof.worlds.output_file import OutputError, OutputFile
from pipeproof.worlds.side_store import Exchange, RanksAbsent, exchange


@dataclass(frozen=True)
class _Seen:
    """What a rank has of a step: who has which tensors is told, the tensors are laid out.

    ``digests``: of each kind of tensor by name; None in place of a gradient. ``spans``: where its part of a gradient
    lies, for those of which it has no more.
    """

    arrival: Arrival
    losses: tuple[float, ...] = ()
    norm: float | None = None
    digests: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)


_NOTHING = FrameworkStep({}, lambda stage, name: name, dict, list, lambda sight: ExitStack())
_LAST_WORDS_S = 10.0  # a rank whose step raised waits no longer than this for the others
KINDS = ("weight", "gradient", "updated weight")


class StepRecording:
    """Sees one step. After it rank 0 has the ``record``; where there is none, ``problem`` says why, on every rank."""

    def __init__(self, microbatches: Sequence[Any] | None, *, timeout_s: float) -> None:
        self.record: Record | None = None
        self.problem = ""
        self._step, self._microbatches, self._timeout_s = _NOTHING, microbatches, timeout_s
        self._exchange: Exchange = exchange()
        self._tensors: dict[str, dict[str, Tensor | None]] = {kind: {} for kind in KINDS}
        self._spans: dict[str, tuple[int, int]] = {}
        self._losses: tuple[float, ...] = ()
        self._norm: float | None = None
        self._steps = 0

    def begin(self, step: FrameworkStep) -> None:
        """Copy the weights that ``step`` begins with."""
        self._step = step
        self._tensors["weight"] = self._weights()

    def complete(self) -> None:
        """Copy what the optimizer is about to take, and the losses."""
        self._steps += 1
        with self.noting():
            if self._steps > 1:
                raise RecordError(TWO_STEPS)
            gradients = self._step.gradients()
            for name, parameter in self._step.parameters():
                if parameter in gradients:
                    self._tensors["gradient"][name] = self._part(name, gradients[parameter])
            self._losses = tuple(float(one) for one in self._step.losses())

    def norm(self, norm: Any) -> None:
        """Note the norm that was told."""
        with self.noting():
            self._norm = float(_whole("the norm", norm) if isinstance(norm, Tensor) else norm)

    def finish(self, file: OutputFile | None, *, framework: str, ended: bool) -> None:
        """Put together what all ranks saw; rank 0 writes it. Where the step has not ``ended``, nobody waits long."""
        bound_s = self._timeout_s if ended else min(self._timeout_s, _LAST_WORDS_S)
        mine, laid_out = _Seen(Arrival({}, None, "")), list[str]()
        with self.noting():
            if not ended:
                raise RecordError("the step raised")
            if self._step.completes_at_its_end(self._steps):
                self.complete()
            self._tensors["updated weight"] = self._weights()
            laid_out += self._laid_out()
            mine = self._seen()
        if self.problem:
            mine = _Seen(Arrival({}, None, self.problem))
        try:
            every = self._exchange.gather(mine, what="the end of the recorded step", bound_s=bound_s)
            with self.noting():
                if self._exchange.rank == 0:
                    self._write(_Whole(every, self._exchange, self._timeout_s).record(framework), file)
        except RanksAbsent as absent:
            self.problem = self.problem or str(absent)
        try:
            self.problem = self._exchange.finish(self.problem, what="the record", bound_s=bound_s)[0]
        except RanksAbsent as absent:
            self.problem = self.problem or str(absent)
        self._exchange.clear(laid_out)
        if self.problem and self._exchange.rank == 0:
            warnings.warn(f"the step was not recorded: {self.problem}", stacklevel=5)

    def _write(self, record: Record, file: OutputFile | None) -> None:
        if file is not None:
            write(record, file)
            self.record = record

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep what is raised inside: it is the record that cannot be, and not the job."""
        try:
            yield
        except (RecordError, WhiteBoxError, OutputError) as error:
            self.problem = self.problem or str(error)
        except Exception as error:  # no one type, and no reason to end a job
            self.problem = self.problem or f"recording raised {raised(error)}"

    def _weights(self) -> dict[str, Tensor | None]:
        return {name: _whole(name, parameter) for name, parameter in self._step.parameters()}

    def _part(self, name: str, gradient: Gradient) -> Tensor | None:
        if not isinstance(gradient, FlatShard):
            return None if gradient is None else _whole(name, gradient)
        part = None if gradient.part is None else gradient.part.detach().flatten().to("cpu", copy=True)
        self._spans[name] = (gradient.start, gradient.start + (0 if part is None else part.numel()))
        return part

    def _laid_out(self) -> Iterator[str]:
        """Lay out every tensor of this rank for rank 0; the names of all."""
        for kind, named in self._tensors.items():
            for name, tensor in named.items():
                if tensor is not None:
                    address = address_of(kind, name, self._exchange.rank)
                    self._exchange.give(address, tensor)
                    yield address

    def _seen(self) -> _Seen:
        held = {name: stage for stage, name in self._names()}
        given = None if self._microbatches is None else tuple(map(_content, self._microbatches))
        digests = {
            kind: {name: None if one is None else digest(one) for name, one in named.items()}
            for kind, named in self._tensors.items()
        }
        return _Seen(Arrival(held, given, self.problem), self._losses, self._norm, digests, self._spans)

    def _names(self) -> Iterator[tuple[int, str]]:
        for stage, module in self._step.stages.items():
            for name, _ in module.named_parameters(remove_duplicate=False):
                yield stage, self._step.name(stage, name)


def address_of(kind: str, name: str, rank: int) -> str:
    """Under what a rank lays out a tensor."""
    return f"recorded {kind} {name} of rank {rank}"


def _whole(name: str, tensor: Tensor) -> Tensor:
    """A copy of all of it. No other rank is asked: one that does not come would hold the job up."""
    held = held_whole(tensor.detach())
    if held is None:
        raise RecordError(f"{name} is a DTensor in parts, and record_step copies whole ones: use check_step")
    return held.to("cpu", copy=True)


def _content(microbatch: Any) -> str:
    """A digest of all tensors of a microbatch, in whatever form a framework wants them: each once, in no order."""
    return digest(sorted({digest(leaf) for leaf in tree_leaves(microbatch) if isinstance(leaf, Tensor)}))


@dataclass(frozen=True)
class _Whole:
    """What all ranks saw, on rank 0, which may take the tensors."""

    every: Sequence[_Seen]
    exchange: Exchange
    timeout_s: float

    def record(self, framework: str) -> Record:
        """The record of it. Raises ``RecordError`` for what is none."""
        arrivals = [one.arrival for one in self.every]
        run, wrong = run_of(arrivals)
        if problems := {rank: one.problem for rank, one in enumerate(arrivals) if one.problem} or wrong:
            raise RecordError(told(problems))
        before, after = self._named("weight"), self._named("updated weight") if self._moved() else {}
        gradients = self._named("gradient")
        losses = self._losses(run)
        norms = {rank: one.norm for rank, one in enumerate(self.every) if one.norm is not None}
        if len(set(norms.values())) > 1:
            said = ", ".join(f"rank {rank} {norm:.9g}" for rank, norm in norms.items())
            raise RecordError(f"ranks told other norms of one step: {said}; check_step tells which is wrong")
        operation = RecordedOperation(
            "train",
            run.microbatches,
            tuple(losses[number] for number in sorted(losses)),
            norm=next(iter(norms.values()), None),
            before={name: tensor for name, tensor in before.items() if tensor is not None},
            gradients=gradients,
            parameters={name: tensor for name, tensor in after.items() if tensor is not None},
        )
        dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in operation.before.values()})
        config = {
            "model": f"a step of {framework}",
            "framework": framework,
            "microbatches": len(run.microbatches),
            "ranks": len(self.every),
            "dtype": "+".join(dtypes),
            **versions(),
        }
        return Record("observed", config, (operation,), places_of(arrivals))

    def _moved(self) -> bool:
        """Whether any weight is another after the step; in a block without an optimizer none is."""
        return any(one.digests["weight"] != one.digests["updated weight"] for one in self.every)

    def _losses(self, run: Run) -> dict[int, float]:
        """By the number of the microbatch."""
        losses: dict[int, float] = {}
        for rank, one in enumerate(self.every):
            share = run.shares[rank]
            if one.losses and (share is None or len(share) != len(one.losses)):
                count = "an unknown number of" if share is None else len(share)
                raise RecordError(f"rank {rank} told {len(one.losses)} losses of {count} microbatches")
            for number, loss in zip(share or (), one.losses, strict=False):
                if losses.setdefault(number, loss) != loss:
                    raise RecordError(
                        f"rank {rank} told {loss:.9g} of microbatch {number}, another {losses[number]:.9g}"
                    )
        if losses and len(losses) < len(run.microbatches):
            raise RecordError(f"{len(losses)} losses were told, of {len(run.microbatches)} microbatches")
        return losses

    def _named(self, kind: str) -> dict[str, Tensor | None]:
        """Each tensor once; what several ranks have of it has to be the same."""
        holders: dict[str, list[int]] = {}
        for rank, one in enumerate(self.every):
            for name in one.digests.get(kind, {}):
                holders.setdefault(name, []).append(rank)
        return {name: self._one(kind, name, ranks) for name, ranks in holders.items()}

    def _one(self, kind: str, name: str, ranks: Sequence[int]) -> Tensor | None:
        if kind == "gradient" and any(name in self.every[rank].spans for rank in ranks):
            return self._joined(name, ranks)
        found = {rank: self.every[rank].digests[kind][name] for rank in ranks}
        first = ranks[0]
        other = next((rank for rank in ranks if found[rank] != found[first]), None)
        if other is not None:
            raise RecordError(
                f"ranks {first} and {other} have another {kind} of {name}: a record has one; check_step tells which "
                "is wrong"
            )
        return None if found[first] is None else self._take(kind, name, first)

    def _joined(self, name: str, ranks: Sequence[int]) -> Tensor:
        """A gradient of which ranks have parts; each stage's, which copies of a tied weight make several, is whole."""
        stages: dict[int, list[int]] = {}
        for rank in ranks:
            stages.setdefault(self.every[rank].arrival.held[name], []).append(rank)
        first, *others = (self._of_stage(name, members) for members in stages.values())
        if not all(one.equal(first) for one in others):
            raise RecordError(f"copies of {name} have other gradients: check_step tells which is wrong")
        return first

    def _of_stage(self, name: str, ranks: Sequence[int]) -> Tensor:
        weight = self._take("weight", name, ranks[0])
        flat: Tensor | None = None
        seen = torch.zeros(weight.numel(), dtype=torch.bool)
        for rank in ranks:
            start, end = self.every[rank].spans.get(name, (0, 0))
            if start < end:
                part = self._take("gradient", name, rank)
                flat = torch.zeros(weight.numel(), dtype=part.dtype) if flat is None else flat
                if end > weight.numel() or seen[start:end].any():
                    raise RecordError(f"rank {rank} has elements {start} to {end - 1} of {name}, which others have too")
                flat[start:end], seen[start:end] = part, True
        if flat is None or not seen.all():
            raise RecordError(f"nobody has {int((~seen).sum())} of {weight.numel()} elements of {name}'s gradient")
        return flat.view(weight.shape)

    def _take(self, kind: str, name: str, rank: int) -> Tensor:
        return self.exchange.take(address_of(kind, name, rank), bound_s=self.timeout_s)


@contextmanager
def recording(
    step: Callable[[], FrameworkStep],
    microbatches: Sequence[Any] | None,
    path: str,
    *,
    framework: Framework,
    timeout_s: float,
) -> Iterator[StepRecording]:
    """Record the step that is trained inside this into the file at ``path``, which rank 0 writes.

    What cannot be recorded is a warning on rank 0. Nothing is written then, and the job goes on.
    """
    seen, name = StepRecording(microbatches, timeout_s=timeout_s), ""
    file: OutputFile | None = None
    with ExitStack() as stack:
        with seen.noting():
            file = stack.enter_context(OutputFile(path))
            made, name = step(), framework.installed
            seen.begin(made)
            stack.enter_context(made.watching(seen))
        ended = False
        try:
            yield seen
            ended = True
        finally:
            seen.finish(file, framework=name, ended=ended)
