"""A rank's stages as they are watched in a step: their calls, and what else may have come to their gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from pipeproof.observers.calls import Call
from pipeproof.observers.own_losses import OwnLoss
from pipeproof.observers.watching import Watcher
from pipeproof.records.rank_part import RankStages
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.own_calls import StageSeen, counting, with_own_loss
from pipeproof.wings.composed.sums import hooks_of
from pipeproof.worlds.stack import Stack


class WatchedStages:
    """Each with a watcher of its own, or all with the one that ``saw`` a step that is over."""

    def __init__(self, by: AgainstItself, saw: Watcher | None = None) -> None:
        self._by, self._saw = by, saw
        self._modules: dict[int, nn.Module] = {}
        self._watchers: dict[int, Watcher] = {}

    def watch(self, stage: int, module: nn.Module, *, kept: bool) -> None:
        """Watch ``stage`` from now on. ``kept``: so that its calls can be run again."""
        watcher = Watcher(keep=self._by.keep if kept else None, generators=self._by.generators, linked=True)
        self._modules[stage], self._watchers[stage] = module, self._saw or watcher
        self._watchers[stage].watch(module)

    def calls(self, microbatches: int) -> dict[int, list[Call]]:
        """Those of each stage that are about microbatches, of which there are so many."""
        warmup = self._by.contract.warmup
        every = {k: self._watchers[k].calls(one, warmup=warmup) or [] for k, one in self._modules.items()}
        if not warmup:
            every = {k: counting(calls, microbatches) for k, calls in every.items()}
        losses = self.own_losses
        return {
            k: [with_own_loss(call, apart=losses[k].apart) for call in own] if k in losses else own
            for k, own in every.items()
        }

    @property
    def unseen(self) -> dict[int, str]:
        """Why not all was seen of a stage, by stage."""
        found = {k: self._watchers[k].unseen(one) for k, one in self._modules.items()}
        return {k: why for k, why in found.items() if why}

    @property
    def arguments(self) -> list[object]:
        """What is no tensor of what was given to calls that are kept."""
        every = (call for k, one in self._modules.items() for call in self._watchers[k].calls(one) or ())
        return [call.again.others for call in every if call.again is not None]

    def seen(self, rank: int, calls: Mapping[int, Sequence[Call]]) -> dict[int, StageSeen]:
        """What other ranks are told of the ``calls`` of stages on this ``rank``: all but what runs them again."""
        outside = self.outside
        return {
            stage: StageSeen(
                rank,
                tuple(replace(call, again=None) for call in own),
                outside=outside.get(stage),
                trains=self._trains(stage),
            )
            for stage, own in calls.items()
        }

    def _trains(self, stage: int) -> bool:
        return any(one.requires_grad for one in self._modules[stage].parameters())

    @property
    def own_losses(self) -> dict[int, OwnLoss]:
        """The losses that stages have of their own."""
        found = {k: self._watchers[k].losses.of(one) for k, one in self._modules.items()}
        return {k: one for k, one in found.items() if one is not None}

    @property
    def outside(self) -> dict[int, Stack]:
        """Where losses were made of what stages gave: of inner ones, these are outside of all stages."""
        found = {k: self._watchers[k].losses.outside(one) for k, one in self._modules.items()}
        return {k: one for k, one in found.items() if one is not None}

    def comm_hooks(self, own: RankStages) -> dict[str, str]:
        """The hooks through which DDP reduces the gradients of this rank's ``own`` stages, by the parameter's name."""
        return hooks_of(own, self._watchers)

    def close(self) -> None:
        """From now on watch nothing."""
        for watcher in self._watchers.values():
            watcher.close()
