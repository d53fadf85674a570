"""A stage that is called as often as there are microbatches, once of that as a trial, took no tensors for others."""

import pytest
import torch

from pipeproof import StageByStage
from pipeproof.records.step_check import check_step
from tests.support.pipeline_here import DATA, MSE, Job, layers


@pytest.mark.parametrize("stages", [1, 2])
def test_a_trial_is_no_call_for_another_microbatch(stages: int) -> None:
    """The last microbatch is left out, and the first comes twice: once in a trial that no backward runs through."""
    chain = layers(torch.tanh, torch.sin)[:stages]
    with check_step(dict(enumerate(chain)), DATA, against=StageByStage(MSE), rename="{}.{}".format) as check:
        tried = DATA[0][0]
        for stage in chain:
            tried = stage(tried)
        Job(chain, DATA[:-1]).step()
        check.gradients()
    cause, *_ = check.verdict.causes
    assert (cause.kind, cause.microbatches) == ("dropped", (len(DATA) - 1,)), str(check.verdict)
