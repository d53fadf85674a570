"""Calls that are no microbatch's are told of, and the sums of gradients decide."""

from dataclasses import dataclass

import pytest
import torch

from pipeproof.core.contract import Contract
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


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("cleared", [True, False])
def test_sums_decide_whether_a_call_too_many_was_a_fault(cleared: bool, warmup: int) -> None:
    job = Tried(layers(torch.tanh, torch.sin), cleared=cleared)
    verdict = checked(job, given=DATA, contract=Contract(warmup=warmup))
    assert verdict.verdict == ("pass" if cleared else "fail"), str(verdict)
    assert bool(verdict.law("microbatches").note) == (not warmup)


@pytest.mark.parametrize("wrong", [False, True])
def test_beside_a_call_too_many_nobody_says_that_every_stage_ran_once(wrong: bool) -> None:
    job = Job(layers(torch.tanh, torch.sin, torch.tanh), trial=True)
    job.fault = lambda stage, m, given: [one * 1.5 if wrong and (stage, m) == (1, 1) else one for one in given]
    verdict = checked(job)
    assert verdict.verdict == ("fail" if wrong else "pass"), str(verdict)
    assert verdict.law("microbatches").note
    assert not any("order" in one.kinds for one in verdict.ruled_out)
