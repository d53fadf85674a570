"""What a stage's gradients are made of: only where the reference's own microbatches add up to its gradients."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from reference.data import Batch
from reference.step import Loss, Site
from reference.traced import Traced
from validation.diagnosis.atoms import Update
from validation.diagnosis.attribution import Attribution, attribute

COUNT, WIDTH = 3, 6
OWNER = {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 1}


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batches() -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [
        Batch((torch.randn(5, WIDTH, generator=draw),), torch.randn(5, WIDTH, generator=draw), 5) for _ in range(COUNT)
    ]


def known() -> tuple[dict[Site, Tensor], Traced]:
    """What a right step gives, and the reference."""
    model, loss = built(), Loss(nn.functional.mse_loss, COUNT)
    losses = [loss.function(model(*batch.inputs), batch.target) for batch in batches()]
    torch.stack(losses).mean().backward()
    due = {(OWNER[name], name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    told = [one.item() for one in losses]
    return due, Traced(model, held=due.keys(), batches=batches(), loss=loss, losses=told, ends={})


def found(seen: Mapping[Site, Tensor], due: Mapping[Site, Tensor], traced: Traced) -> Attribution:
    return attribute(Update(seen, due, traced, placement=(0, 1)))


@pytest.mark.parametrize("factor", [-3.0, 0.25])
def test_gradients_that_the_microbatches_do_not_add_up_to_are_not_taken_apart(factor: float) -> None:
    due, traced = known()
    assert found(due, due, traced).right
    other = {site: factor * gradient if site[0] == 1 else gradient for site, gradient in due.items()}
    told = found(other, other, traced)
    assert not told.causes
    assert told.unknown == ("stage 1: what the reference's microbatches give does not add up to its own gradients",)
