"""What a step of a running job may be held against that is neither a record nor a model beside the job."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import nn
from torch.optim import Optimizer

from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox.expectation import Expectation

if TYPE_CHECKING:  # what a check is, only it needs to load
    from pipeproof.records.checked_step import CheckedStep
    from pipeproof.records.rank_part import Rename
    from pipeproof.records.step_record import Pairs


class StepExpectation(Expectation):
    """It checks some of a job's steps, as it is told, each with a check of its own.

    build: makes the whole model, if the user says how. generators: what stages draw from.
    """

    build: Callable[[], nn.Module] | None
    generators: Sequence[Any]

    @abstractmethod
    def turn(self) -> int | None:
        """The number of the next step among those that are checked; None where it is not. Every call is a step."""

    @abstractmethod
    def check_of(
        self,
        modules: nn.Module | Mapping[int, nn.Module],
        microbatches: "Pairs | None",
        *,
        rename: "Rename",
        timeout_s: float,
        turn: int,
    ) -> "CheckedStep":
        """The check of a step, the one of this ``turn``; the rest is as for ``check_step``."""

    @property
    @abstractmethod
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All of this rank's; none where nobody says."""

    @abstractmethod
    def in_framework(self, claims: Mapping[str, Any], **known: Any) -> Self:
        """The same, with what the adapter of a framework knows of its job.

        ``claims`` stand in place of the contract's, ``known`` in place of what the user said beside it.
        """

    @abstractmethod
    def for_framework(self, accumulation: Accumulation | None) -> Self:
        """The same, of a framework's job, where the contract does not say otherwise.

        It adds gradients up like this. Its adapter gives weights their names in the whole model: by these, weights of
        several stages are one or not.
        """
