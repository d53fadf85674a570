"""A call that is no microbatch's: one that adds nothing is counted, and one that may add something is declared."""

from dataclasses import dataclass

import pytest
import torch

from pipeproof.core.contract import Contract
from pipeproof.core.reason import Reason
from tests.support.pipeline_here import DATA, Job, checked, layers


@dataclass
class Tried(Job):
    """Runs one microbatch more, first of all, of which nobody told. ``cleared``: what it gave is."""

    cleared: bool = True

    def step(self) -> list[float]:
        self._train(0, torch.ones(4, 8), DATA[0][1])
        for one in (one for stage in self.stages for one in stage.parameters()):
            one.grad = None if self.cleared else one.grad
        return super().step()


@pytest.mark.parametrize(
    ("cleared", "warmup", "outcome"),
    [(True, 1, "pass"), (False, 1, "fail"), (True, 0, "unknown"), (False, 0, "unknown")],
)
def test_a_first_call_that_trains_is_declared(cleared: bool, warmup: int, outcome: str) -> None:
    job = Tried(layers(torch.tanh, torch.sin), cleared=cleared)
    verdict = checked(job, given=DATA, contract=Contract(warmup=warmup))
    assert verdict.verdict == outcome, str(verdict)
    reasons = {reason for law in verdict.laws for reason in law.reasons}
    assert (Reason.CALLS in reasons) == (outcome == "unknown"), str(verdict)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_call_that_trains_nothing_is_counted(wrong: bool) -> None:
    job = Job(layers(torch.tanh, torch.sin, torch.tanh), trial=True)
    job.fault = lambda stage, m, given: [one * 1.5 if wrong and (stage, m) == (1, 1) else one for one in given]
    verdict = checked(job)
    assert verdict.verdict == ("fail" if wrong else "pass"), str(verdict)
    assert verdict.law("microbatches").note
    assert not any("order" in one.kinds for one in verdict.ruled_out)
