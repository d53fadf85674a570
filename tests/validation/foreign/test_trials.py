"""A first call of each stage, one too many: a trial, unless its gradient is in the sums."""

from dataclasses import dataclass

import torch

from pipeproof.core.verdict import Verdict
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, Job, checked, layers


@dataclass
class Tried(Job):
    """Runs one microbatch more, first of all, of which nobody told."""

    cleared: bool = True

    def step(self) -> list[float]:
        self._train(0, torch.ones(4, 8), DATA[0][1])
        for one in (one for stage in self.stages for one in stage.parameters()):
            one.grad = None if self.cleared else one.grad
        return super().step()


def verdict_of(*, cleared: bool) -> Verdict:
    return checked(Tried(layers(torch.tanh, torch.sin), cleared=cleared), given=DATA)


def test_a_first_call_too_many_that_adds_nothing_is_taken_for_a_trial_and_that_is_said() -> None:
    verdict = verdict_of(cleared=True)
    assert verdict.verdict == "pass", str(verdict)
    golden(verdict.law("microbatches").note)


def test_a_first_call_too_many_whose_gradient_is_in_the_sums_is_told_of_beside_the_gradients() -> None:
    """A microbatch that was not given, or an evaluation that trains: nobody knows which."""
    verdict = verdict_of(cleared=False)
    assert verdict.verdict == "fail", str(verdict)
    golden(verdict.law("microbatches").note)
    assert not any("order" in one.kinds for one in verdict.ruled_out)


def test_beside_a_trial_nobody_says_that_every_stage_ran_once() -> None:
    job = Job(layers(torch.tanh, torch.sin, torch.tanh), trial=True)
    job.fault = lambda stage, m, given: [one * 1.5 if (stage, m) == (1, 1) else one for one in given]
    verdict = checked(job)
    assert verdict.verdict == "fail", str(verdict)
    golden(verdict.law("microbatches").note)
    assert not any("order" in one.kinds for one in verdict.ruled_out)
