"""What gradients a step began with: what has grown since must come from calls that are seen."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.observers.calls import Call
from pipeproof.observers.elements import any_nonzero
from pipeproof.observers.shards import held_here, is_plain
from pipeproof.pipeline.sizes import first_few
from pipeproof.records.rank_part import RankStages
from pipeproof.records.record import RecordError
from pipeproof.reference.step import dense
from pipeproof.wings.composed.own_calls import on_its_own
from pipeproof.wings.composed.rerun import StageRerun
from pipeproof.wings.composed.wiring import several_calls

_CALLED = (
    "pass the very module that is called, and call it itself, not its forward; of a compiled one, that is what "
    "torch.compile returned"
)
_SUMMED = (
    "stage {} itself adds up the gradient of {} as it runs, and autograd gives another: put back, and not compared; a "
    "SingleDevice compares it"
)
_ELSEWHERE = (
    "no backward through stage {} gives the gradient of {}: it is put off, or other code writes it; a SingleDevice "
    "compares it"
)
_COMPILED = "its compile() hides them; compile the modules in it, or pass and call what torch.compile returns of it"
_SILENT = (
    " has parameters to be trained, and ran without gradients, as under no_grad: where that is meant, call "
    "requires_grad_(False) on them"
)


class Begun:
    """The gradients of a rank that were not zero when its step began; ``keep`` copies one."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        self._keep = keep
        self._kept: dict[str, Tensor] = {}

    def take(self, gradients: Mapping[str, Any]) -> None:
        """The step begins with these, by name, in place of what it was said to begin with; of shards with its own."""
        tensors = {name: held_here(one) for name, one in gradients.items() if isinstance(one, Tensor)}
        there = {name: one for name, one in tensors.items() if is_plain(one)}
        self._kept = {name: self._keep(one) for name, one in there.items() if any_nonzero(one)}

    def get(self, name: str) -> Tensor | None:
        """What one was; None where it was zero, or none."""
        return self._kept.get(name)

    def has_grown(self, name: str, gradient: Tensor | None) -> bool:
        """Whether anything was added to it since."""
        gradient = None if gradient is None else held_here(gradient)
        if gradient is None or not any_nonzero(dense(gradient)):
            return False
        begun = self._kept.get(name)
        return begun is None or not torch.equal(begun.to(gradient.device), dense(gradient))

    def check_called(self, own: RankStages, calls: Mapping[int, Sequence[Call]], microbatches: int) -> None:
        """Raise ``RecordError`` for a stage that computes, as its gradients show, and in no ``calls`` that are seen."""
        for stage, module in own.modules.items():
            wanting = [(name, one.grad) for name, one in module.named_parameters() if one.requires_grad]
            grown = any(self.has_grown(own.rename(stage, name), gradient) for name, gradient in wanting)
            if not calls[stage] and (grown or not wanting):
                raise RecordError(
                    f"no call of stage {stage}'s module was seen: {_COMPILED if _in_place(module) else _CALLED}"
                )
            if len(calls[stage]) >= 2 * microbatches and on_its_own(calls[stage]):
                raise RecordError(several_calls(stage, "on what it gave itself"))

    def without_gradients(self, own: RankStages, calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
        """Which stages ran without gradients and have something to train: nobody knows whether that is meant."""
        for stage, module in own.modules.items():
            silent = bool(calls[stage]) and all(call.silent and not call.ran for call in calls[stage])
            if silent and any(one.requires_grad for one in module.parameters()):
                yield f"stage {stage}{_SILENT}"

    def note_elsewhere(
        self, own: RankStages, left: Mapping[str, Any], stage: StageRerun, wrote: Callable[[Tensor], bool]
    ) -> None:
        """Note that nobody knows what a stage gives whose gradients come from elsewhere than autograd.

        left: this rank's gradients, by the model's names. wrote: whether the stage, run again, wrote to a tensor.
        """
        names = {name: left.get(own.rename(stage.stage, name)) for name in stage.single_names}
        there = {name: getattr(one, "part", one) for name, one in names.items() if one is not None}
        summed = [name for name, one in there.items() if isinstance(one, Tensor) and wrote(one)]
        other = [n for n in stage.unreached if self.has_grown(own.rename(stage.stage, n), there.get(n))]
        obstacle = _SUMMED.format(stage.stage, first_few(summed)) if summed else ""
        if other and not obstacle:
            obstacle = _ELSEWHERE.format(stage.stage, first_few(other))
        if obstacle and stage.links and not any(link.obstacle for link in stage.links):
            stage.links[0] = replace(stage.links[0], obstacle=obstacle)


def _in_place(module: nn.Module) -> bool:
    """Whether its ``compile`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None
