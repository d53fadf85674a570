"""Further expectations for a step of a running job, beside records and single-device models."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import nn
from torch.optim import Optimizer

from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox.expectation import Expectation

if TYPE_CHECKING:  # only checks themselves need to load it
    from pipeproof.records.checked_step import CheckedStep
    from pipeproof.records.step_record import Pairs


class StepExpectation(Expectation):
    """Checks a job's steps, or some steps, each separately.

    build: makes the whole model, if given. generators: random sources of stages.
    """

    build: Callable[[], nn.Module] | None
    generators: Sequence[Any]

    @abstractmethod
    def turn(self) -> int | None:
        """Count this step: return its number among checked steps, or None. Every call is a step."""

    @abstractmethod
    def check_of(
        self, modules: nn.Module | Mapping[int, nn.Module], microbatches: "Pairs | None", **options: Any
    ) -> "CheckedStep":
        """Return the check for a ``turn``; further arguments follow ``check_step``."""

    @property
    @abstractmethod
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The rank's optimizers; empty if unknown."""

    @abstractmethod
    def in_framework(self, claims: Mapping[str, Any], **known: Any) -> Self:
        """Return a copy with an adapter's knowledge of its framework's job.

        ``claims`` replace the contract's, ``known`` the user's other settings.
        """

    @abstractmethod
    def for_framework(self, accumulation: Accumulation | None) -> Self:
        """Return a copy with a framework's ``accumulation``, unless the contract has one.

        Its adapter names weights as in the whole model: equal names in several stages are one weight.
        """
