"""Where what is expected of a step comes from, if not from the whole model on one device."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Self

from torch import nn

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.reference.model import LossFn
from pipeproof.whitebox.rank import RankOrder
from pipeproof.whitebox.task import Task, WhiteBoxError
from pipeproof.worlds.worker import RankContext

OF_A_MODEL = "leave it out, or let reference= be a function that builds the whole model"


class Expectation(ABC):
    """What ``reference=`` of ``whitebox.validate`` may be in place of a function that builds the whole model."""

    contract: Contract

    @abstractmethod
    def checked(self, context: RankContext, order: RankOrder, bound_s: float) -> Verdict:
        """One rank's part of a step of ``order``, judged by all ranks; a job for ``World.run``.

        All ranks give the same. ``bound_s`` bounds each wait for others, in seconds.
        """

    @abstractmethod
    def of_a_step(self, loss_fn: LossFn | None, contract: Contract) -> Self:
        """The same, of a step that is run to be checked, with what was said beside it. Raises ``WhiteBoxError``."""

    @abstractmethod
    def whole(self) -> nn.Module | None:
        """The model that the step is given; None where there is none. Raises ``WhiteBoxError``."""


@dataclass(frozen=True)
class LinkedTask(Task):
    """A step whose ranks judge it ``by`` an expectation of their own."""

    by: Expectation = field(kw_only=True)

    @classmethod
    def of(cls, task: Task, by: Expectation) -> Self:
        """``task``, judged so. Raises ``WhiteBoxError`` for what only a whole model can be asked for."""
        if task.optimizer is not None:
            raise WhiteBoxError(f"optimizer= with a Composed, which holds a step up to its gradients: {OF_A_MODEL}")
        by = by.of_a_step(task.loss_fn, task.contract)
        return cls(task.step, by.whole, task.microbatches, contract=by.contract, by=by)

    @property
    def in_pairs(self) -> bool:
        return True

    @property
    def beside(self) -> str:
        return "link by link"
