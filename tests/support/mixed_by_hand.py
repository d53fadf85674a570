"""Steps in mixed precision as a white box takes them: beside a model on one device that computes in the same types."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.verdict import Verdict
from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.handed_back import StepResult
from pipeproof.wings.specimens.mixed import RANKS, MixedCase
from pipeproof.wings.specimens.mixed_step import MixedPrecision, MixedStep, loss_fn, microbatches_of


class Casting(nn.Sequential):
    """Computes in a narrower type, as a stage under autocast does."""

    def __init__(self, dtype: torch.dtype, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.dtype = dtype

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            return super().forward(input)


def model_of(way: MixedPrecision) -> nn.Sequential:
    """The stages of all ranks, one after another."""
    stages = [MixedStep(MixedPrecision(), rank, RANKS).stage for rank in range(RANKS)]
    if way.autocast is not None:
        stages = [Casting(way.autocast, *stage) for stage in stages]
    return nn.Sequential(*stages).to(way.weights)


def step_of(case: MixedCase, *, watched: bool) -> Callable[[Any, list[Any]], StepResult]:
    """The step, which hands back gradients when they are complete."""

    def step(model: Any, microbatches: Sequence[Any]) -> StepResult:
        rank = dist.get_rank()
        stage = watch(model[rank]) if watched else model[rank]
        of_model = type("Here", (case.step,), {"built": lambda self: stage})
        one, kept = of_model(case.way, rank, RANKS), dict[Any, Tensor]()

        def look(gradients: dict[str, Tensor]) -> None:
            kept.update({one.named[name]: gradient.clone() for name, gradient in gradients.items()})

        one.run(microbatches, look)
        return StepResult(
            one.stage,
            one.losses or None,
            one.norm,
            gradients=kept,
            max_norm=case.way.max_norm,
            masters=case.way.masters,
            accumulation=Accumulation(torch.float32) if case.way.main_grad else None,
            loss_scale=one.scaler.get_scale() if case.way.scale else None,
        )

    return step


def seen_from_outside(case: MixedCase, whitebox: WhiteBox, *, watched: bool = True) -> Verdict:
    """The verdict of a white box."""
    return whitebox.validate(
        step_of(case, watched=watched),
        reference=partial(model_of, case.way),
        microbatches=list(microbatches_of(case.way)),
        ranks=RANKS,
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
    )
