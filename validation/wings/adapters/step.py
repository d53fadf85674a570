"""A framework's step on one rank, seen by its adapter, and its observers: for a validation, a check or a recording.

The data that a job's rank draws are compared by content with the microbatches that a check was given.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.fence import Fence, looking
from pipeproof.core.observe.shards import whole_here
from pipeproof.pipeline.action import Action
from pipeproof.records.record import RecordError
from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox.handed_back import Gradient, StepResult, copy_gradient
from pipeproof.whitebox.task import WhiteBoxError

TWO_STEPS = "the block took more than one step of the optimizer: put one step into it"
NORM_IN_PARTS = "it is a DTensor in parts, which are not put together: clip by its full_tensor()"
_TOO_MANY = "the block ran {} microbatches, and the check was given {}: put one step into it, or give it all of them"
Content = frozenset[tuple[bytes, int]]  # digests of a microbatch, unordered; equal ones are counted
NOT_GIVEN = (
    "the job drew data that is in none of the microbatches given to the check: pass those that this rank's replica "
    "trains in the step"
)


def content(microbatch: Any) -> Content:
    """Return the content of all tensors in ``microbatch``, in any framework's form."""
    counts = Counter(digest(leaf) for leaf in tree_leaves(microbatch) if isinstance(leaf, Tensor))
    return frozenset((one, number) for one, count in counts.items() for number in range(count))


def content_of_rows(tensors: Iterable[Any]) -> Content:
    """Return the content of the rows of ``tensors``; frameworks cut or join microbatches by rows."""
    return frozenset(_rows(tensors))


def _rows(tensors: Iterable[Any]) -> Iterator[tuple[bytes, int]]:
    """Yield the content of each row in ``tensors``."""
    yield from ((digest(row), 0) for one in tensors if isinstance(one, Tensor) and one.dim() for row in one)


class Drawn:
    """Data drawn so far; empty if a rank draws none, or its adapter cannot observe it."""

    def __init__(self) -> None:
        self.fence = Fence()
        self._drawn: list[Content] = []
        self._targets: list[Content] = []

    @looking
    def note(self, microbatch: Any) -> None:
        """Note a microbatch, or a batch."""
        self._drawn.append(content(microbatch))

    @looking
    def note_rows(self, tensors: Iterable[Any]) -> None:
        """Note the rows of a pipeline's input before the cut."""
        self._drawn.extend(frozenset([row]) for row in _rows(tensors))

    @looking
    def note_targets(self, tensors: Iterable[Any]) -> None:
        """Note rows of targets, which give the order if inputs go unobserved."""
        self._targets.extend(frozenset([row]) for row in _rows(tensors))

    def noting(self, source: Any) -> Any:
        """Wrap ``source``, the job's data, to note every draw; None stays None."""
        return None if source is None else _Noted(source, self)

    def is_other_than(self, given: Collection[Content]) -> bool:
        """True if some drawn content neither contains nor belongs to the content ``given``."""
        known = frozenset[tuple[bytes, int]]().union(*given)
        some = [one for one in given if one]
        return bool(known) and any(not one <= known and not any(its <= one for its in some) for one in self._drawn)

    def order(self, given: Sequence[Content]) -> Sequence[int]:
        """Return the order in which microbatches ``given`` were drawn; empty if content is ambiguous."""
        found: list[int] = []
        for one in self._drawn or self._targets:
            own = [k for k, its in enumerate(given) if its and (one <= its or its <= one)]
            if len(own) != 1:
                return ()
            found += own if own != found[-1:] else []
        return found if sorted(found) == [*range(len(given))] else ()


class _Noted:
    """An iterator that notes its items; otherwise like the original."""

    def __init__(self, source: Any, drawn: Drawn) -> None:
        self._source, self._drawn = source, drawn
        self._items: Iterator[Any] = iter(source)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self._drawn.note(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def contents(microbatches: Sequence[Any] | None) -> list[Content]:
    """Return the content of each microbatch; empty for None."""
    return [content(one) for one in microbatches or ()]


class Sight(Protocol):
    """Receives the observable moments of a step."""

    def complete(self) -> None:
        """Gradients are complete: reduced, before clipping and before the optimizer."""

    def norm(self, norm: Any) -> None:
        """The framework reports this gradient norm, a number."""


def _unknown() -> None:
    """The order of actions, for a framework that does not report it."""


def _own(parameter: nn.Parameter) -> Tensor | None:
    """Return autograd's own sum."""
    return parameter.grad


@dataclass(frozen=True)
class FrameworkStep:
    """A framework's step on one rank.

    stages: this rank's modules by the number of the stage. name: maps a stage and a parameter's name in the module to
    the reference's name. gradients: before the optimizer's step, in their current place. losses: of microbatches so
    far, undivided; empty if this rank has none. watching: informs the sight while open.

    when: true if a call of a stage counts, asked at every call; None: all do. actions: this rank's actions in order, if
    reported. unfinished: the mistake if gradients were never complete; None: final gradients count. drawn: this rank's
    observed draws of data. max_norm: the norm to which gradients were clipped, if any. masters: the optimizer updates
    copies of weights in a wider type. sum_of: the current sums of microbatches' gradients on this rank. accumulation:
    how gradients are added, apart from replicas' shares; None: each in its own type, in the order of microbatches.
    """

    stages: Mapping[int, nn.Module]
    name: Callable[[int, str], str]
    gradients: Callable[[], Mapping[nn.Parameter, Gradient]]
    losses: Callable[[], Sequence[Any]]
    watching: Callable[[Sight], AbstractContextManager[object]]
    when: Callable[[], bool] | None = None
    actions: Callable[[], Sequence[Action] | None] = _unknown
    unfinished: WhiteBoxError | None = None
    drawn: Drawn = field(default_factory=Drawn)
    max_norm: Callable[[], float | None] = _unknown
    masters: bool = False
    sum_of: Callable[[nn.Parameter], Gradient] = _own
    accumulation: Accumulation | None = None

    def completes_at_its_end(self, steps: int) -> bool:
        """True if final gradients count after this many observed steps of the optimizer.

        Raises ``unfinished``.
        """
        if not steps and self.unfinished is not None:
            raise self.unfinished
        return not steps

    def sums(self, stage: int) -> dict[str, Gradient]:
        """Return the current sums of gradients in ``stage``, by the reference's names."""
        named = self.stages[stage].named_parameters(remove_duplicate=False)
        return {self.name(stage, name): self.sum_of(one) for name, one in named}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter of this rank under each of its names in the reference."""
        for stage, module in self.stages.items():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                yield self.name(stage, name), parameter


def telling(sight: Sight, norm: Callable[[Any], Any]) -> Callable[..., Any]:
    """Wrap an optimizer's step: notify ``sight`` before it, and then of the ``norm`` in its result, if present."""

    def around(step: Callable[..., Any], *given: Any, **named: Any) -> Any:
        sight.complete()
        result = step(*given, **named)
        if (found := norm(result)) is not None:
            sight.norm(found)
        return result

    return around


class Observation:
    """What a step shows on a rank, kept for ``whitebox.validate``.

    data_iterator: what to train it on. forward_step: what to hand to Megatron's schedule.
    """

    def __init__(self, step: FrameworkStep, data_iterator: Any = None) -> None:
        self.data_iterator = data_iterator
        self.forward_step: Any = None
        self._step = step
        self._gradients: dict[nn.Parameter, Gradient] | None = None
        self._losses: list[Tensor | float] = []
        self._norm: float | None = None

    def result(self) -> StepResult:
        """Return the step's result for ``whitebox.validate``."""
        step = self._step
        if step.completes_at_its_end(self._gradients is not None):
            self.complete()
        stages = list(step.stages)
        return StepResult(
            list(step.stages.values()),
            self._losses or None,
            self._norm,
            step.actions(),
            gradients=self._gradients,
            names=lambda name, rank, chunk: step.name(stages[chunk], name),
            max_norm=step.max_norm(),
            masters=step.masters,
            accumulation=step.accumulation,
        )

    def complete(self) -> None:
        """Copy the current gradients."""
        if self._gradients is not None:
            raise WhiteBoxError(TWO_STEPS)
        self._gradients = {one: copy_gradient(gradient) for one, gradient in self._step.gradients().items()}
        self._losses = [one.detach().clone() if isinstance(one, Tensor) else one for one in self._step.losses()]

    def norm(self, norm: Any) -> None:
        """Keep the reported ``norm``."""
        whole: Any = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of a DTensor
        self._norm = float(whole)


class Looks(Protocol):
    """Receives a job's step: a check, or a recording. It keeps its own errors, and never ends the job.

    noting: catches errors inside. refuse: drops this rank's part. gradients: before the optimizer's step. report:
    losses of microbatches, undivided, or the norm. miss_norm: why a norm cannot be reported.
    """

    def noting(self) -> AbstractContextManager[None]: ...

    def refuse(self, why: str) -> None: ...

    def gradients(self, named: Mapping[str, Gradient]) -> None: ...

    def report(self, *, losses: Sequence[float] | None = None, norm: float | None = None) -> None: ...

    def miss_norm(self, why: str) -> None: ...


class JobSight:
    """Shows the observations of ``step`` to a check; its microbatches are ``given`` in the form drawn by the job."""

    def __init__(self, to: Looks, step: FrameworkStep, *, count: int = 0, given: Sequence[Content] = ()) -> None:
        self._to, self._step, self._count, self._given = to, step, count, given
        self._steps = 0
        self._hooks: list[RemovableHandle] = []  # before the steps of optimizers

    @contextmanager
    def watching(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Complete gradients at the latest before the first step of ``optimizers``, while open."""
        self._hooks += [one.register_step_pre_hook(lambda *_: self.complete()) for one in optimizers]
        try:
            yield
        finally:
            self._unhook()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def complete(self) -> None:
        """Show gradients before the optimizer's step, and losses on this rank."""
        self._steps += 1
        self._unhook()  # the check refuses optimizers with hooks
        if self._steps > 1:
            self._to.refuse(TWO_STEPS)
            return
        with self._to.noting():
            gradients = self._step.gradients()
            found = (pair for pair in self._step.parameters() if pair[1] in gradients or not pair[1].requires_grad)
            self._to.gradients({name: gradients.get(one) for name, one in found})  # frozen parameters have none
            losses = [float(one) for one in self._step.losses()]
            if 0 < 2 * self._count <= len(losses):  # no fault of a framework's runs every microbatch once more
                raise RecordError(_TOO_MANY.format(len(losses), self._count))
            if losses:
                order = self._step.drawn.order(self._given)  # the job may draw them in another
                self._to.report(losses=_as_given(losses, order))

    def norm(self, norm: Any) -> None:
        """Show the reported norm."""
        with self._to.noting():
            here = whole_here(norm.detach()) if isinstance(norm, Tensor) else norm
            if here is None:  # only all ranks together know it, and one that does not come would hold the job up
                self._to.miss_norm(NORM_IN_PARTS)
            elif self._steps <= 1:
                self._to.report(norm=float(here))

    def end(self) -> None:
        """End the step: if gradients were never complete, show the current ones, or the reason for having none.

        A step on data other than the check's is not wrong.
        """
        if self._step.drawn.is_other_than(self._given):
            self._to.refuse(NOT_GIVEN)
        try:
            if self._step.completes_at_its_end(self._steps):
                self.complete()
        except WhiteBoxError as unfinished:
            self._to.refuse(str(unfinished))


def _as_given(losses: Sequence[float], order: Sequence[int]) -> Sequence[float]:
    """Return ``losses`` in the order given, from the order drawn; each microbatch may have been split equally."""
    if not order or len(losses) % len(order):
        return losses
    times = len(losses) // len(order)
    return [losses[order.index(k) * times + n] for k in range(len(order)) for n in range(times)]
