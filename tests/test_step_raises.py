"""A step that raises leaves no gradient behind, wherever it raises."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import PipelineSchedule
from pipeline.step import Parts
from validation.around import AroundGradients


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(2, 4), torch.zeros(2, 4)) for _ in range(count)]


def step_of(**more: Any) -> tuple[PipelineSchedule, nn.Module]:
    module = nn.Linear(4, 4)
    given = {"kind": "gpipe", "n_microbatches": 2, "stages": [module], "loss_fn": mse}
    return PipelineSchedule(**given, **more), module


class Raising(AroundGradients):
    """Gradient work of which one part raises."""

    def __init__(self, parts: Parts, part: str) -> None:
        super().__init__(parts.gradients, parts.stages)
        setattr(self, part, self._raise)

    def _raise(self, *_: object) -> Any:
        raise RuntimeError("a peer is gone")


@pytest.mark.parametrize("part", ["reduce_tied", "squares", "scale"])
def test_gradients_are_cleared_wherever_a_step_raises(part: str) -> None:
    schedule, module = step_of()
    broken = schedule.wrapped(lambda parts: replace(parts, gradients=Raising(parts, part)))
    with pytest.raises(RuntimeError, match="a peer is gone"):
        broken.train_step(pairs(2), max_norm=1.0)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_gradients_are_cleared_where_sharing_the_losses_or_the_optimizer_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*_: object) -> Any:
        raise RuntimeError("a peer is gone")

    for target in ("pipeline.step.gather", "torch.optim.SGD.step"):
        schedule, module = step_of()
        schedule._optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a peer is gone"):
            patch.setattr(target, gone)
            schedule.train_step(pairs(2))
        assert all(parameter.grad is None for parameter in module.parameters()), target
