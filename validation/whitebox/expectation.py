"""Expectations from other sources than a whole model on one device."""

from abc import ABC, abstractmethod
from dataclasses import replace
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
    """A ``reference=`` for ``whitebox.validate`` in place of a function that builds the whole model."""

    contract: Contract

    @abstractmethod
    def check_on_rank(self, context: RankContext, order: RankOrder, bound_s: float) -> Verdict:
        """Run and judge ``order`` on one rank, together with all ranks; a job for ``World.run``.

        All ranks return the same verdict. ``bound_s`` bounds each wait for others, in seconds.
        """

    @abstractmethod
    def of_a_step(self, loss_fn: LossFn | None, contract: Contract) -> Self:
        """Return a copy for a step under check, with further words. Raises ``WhiteBoxError``."""

    @abstractmethod
    def whole(self) -> nn.Module | None:
        """Return the step's model, or None. Raises ``WhiteBoxError``."""

    def judge(self, task: Task) -> Task:
        """Return ``task``, judged by this. Raises ``WhiteBoxError`` for options that need a whole model."""
        if task.optimizer is not None:
            raise WhiteBoxError(f"optimizer= with a StageByStage, which holds a step up to its gradients: {OF_A_MODEL}")
        by = self.of_a_step(task.loss_fn, task.contract)
        return replace(task, reference=by.whole, loss_fn=None, contract=by.contract, by=by)
