"""What is said of gradients where one stage alone is run again."""

import pytest
import torch
from torch import nn

from pipeproof.core.verdict import Verdict
from pipeproof.records.step_check import check_step
from pipeproof.wings.composed import StageByStage
from tests.support.pipeline_here import DATA, MSE, Job, Layer, layers


def verdicts(inner: nn.Module) -> list[Verdict]:
    """Of three steps, each of another stage; the second is ``inner``."""
    first, last = layers(torch.tanh, torch.sin)
    job, by, found = Job([first, inner, last]), StageByStage(MSE, stages="one by one"), list[Verdict]()
    for _ in job.stages:
        with check_step(dict(enumerate(job.stages)), DATA, against=by, rename="{}.{}".format) as check:
            job.step()
            check.gradients()
        found.append(check.verdict)
        nn.ModuleList([first, last]).zero_grad()
    return found


@pytest.mark.parametrize("inner", [nn.Tanh(), Layer(trained=False)], ids=["none", "frozen"])
def test_a_stage_may_have_nothing_to_train(inner: nn.Module) -> None:
    for verdict in verdicts(inner):
        assert verdict.outcome == "pass", str(verdict)


def test_a_frozen_weight_has_no_gradient() -> None:
    frozen = Layer(trained=False)
    frozen.layer.weight.grad = torch.ones(8, 8)
    assert [law.outcome for law in verdicts(frozen)[1].laws if law.name == "presence"] == ["fail"]
