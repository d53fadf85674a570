"""A framework's step on one rank, seen by its adapter, and its observers: for a validation, a check or a recording."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pipeproof.core.observe.shards import whole_here
from pipeproof.pipeline.action import Action
from pipeproof.records.record import RecordError
from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox.handed_back import Gradient, StepResult, copy_gradient
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.adapters.drawn import NOT_GIVEN, Content, Drawn

TWO_STEPS = "the block took more than one step of the optimizer: put one step into it"
NORM_IN_PARTS = "it is a DTensor in parts, which are not put together: clip by its full_tensor()"
_TOO_MANY = "the block ran {} microbatches, and the check was given {}: put one step into it, or give it all of them"


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
