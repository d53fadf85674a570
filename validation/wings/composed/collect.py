"""Collection on a rank during a step: stages' calls, initial gradients, and optimizer steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.elements import any_nonzero, version
from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.own_losses import OwnLoss
from pipeproof.core.observe.shards import is_plain, local_tensor
from pipeproof.core.observe.watching import Watcher
from pipeproof.pipeline.sizes import first_few
from pipeproof.records.rank_part import RankStages
from pipeproof.records.record import RecordError
from pipeproof.reference.graph import is_inside_a_backward
from pipeproof.reference.step import dense
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.link import StageCalls
from pipeproof.wings.composed.rerun import StageRerun

_UNSEEN = (
    "no call of stage {}'s module was observed: pass the module that is called, and call it itself, not its forward; "
    "compile it by torch.compile and pass what that returns, or compile the modules in it"
)
_WRITTEN = (
    "the gradient of {} in stage {} is not what backwards through the stage give: other code writes it, or it comes "
    "later; check against a SingleDevice"
)
_EARLY = (
    "an optimizer took its step before gradients() was called: call gradients() after the last backward, and before "
    "gradients are clipped and weights updated; take no steps inside backwards"
)


class WatchedStages:
    """A rank's stages, each with its own watcher, or all with the watcher that ``saw`` a finished step."""

    def __init__(self, by: AgainstItself, saw: Watcher | None = None) -> None:
        self._by, self._saw = by, saw
        self._stages: dict[int, tuple[Watcher, nn.Module]] = {}

    def watch(self, stage: int, module: nn.Module, *, kept: bool) -> None:
        """Watch ``stage`` from now on. ``kept``: keep its calls for reruns."""
        own = Watcher(keep=self._by.keep if kept else None, generators=self._by.generators, linked=True)
        self._stages[stage] = watcher, _ = self._saw or own, module
        watcher.watch(module)

    def calls(self, microbatches: int) -> dict[int, list[Call]]:
        """Return each stage's calls about microbatches, given their number."""
        warmup, found = self._by.contract.warmup, dict[int, list[Call]]()
        for stage, (watcher, module) in self._stages.items():
            calls = watcher.calls(module, warmup=warmup) or []
            trained = [call for call in calls if call.ran]
            several = len(trained) >= microbatches or len(calls) > microbatches
            found[stage] = trained if several and not warmup else calls
        # A loss's backward apart from the stage's leaves gradients handed back unobserved; so does an input's gradient
        # that was asked for earlier, for example for a gradient penalty.
        for stage, loss in self.own_losses.items():
            for k, call in enumerate(found[stage]):
                several = any(len(those) > 1 for (is_output, _), those in call.parts.items() if not is_output)
                parts = {at: those for at, those in call.parts.items() if at[0]}
                if loss.apart or several:
                    found[stage][k] = replace(call, input_gradients={}, in_parts={}, parts=parts)
        return found

    @property
    def unseen(self) -> dict[int, str]:
        """Reasons for incomplete observation, by stage."""
        return {stage: why for stage, (watcher, module) in self._stages.items() if (why := watcher.unseen(module))}

    @property
    def arguments(self) -> list[object]:
        """Non-tensor arguments of the calls kept."""
        every = (call.again for watcher, module in self._stages.values() for call in watcher.calls(module) or ())
        return [again.others for again in every if again is not None]

    def public_calls(self, rank: int, calls: Mapping[int, Sequence[Call]]) -> dict[int, StageCalls]:
        """Return ``calls`` on this ``rank`` in the form sent to other ranks: without the means to rerun them."""
        found = {}
        for stage, (watcher, module) in self._stages.items():
            trains = any(one.requires_grad for one in module.parameters())
            alone = tuple(replace(call, again=None) for call in calls[stage])
            # For inner stages, these losses lie outside all stages.
            found[stage] = StageCalls(rank, alone, outside=watcher.losses.outside.get(module), trains=trains)
        return found

    @property
    def own_losses(self) -> dict[int, OwnLoss]:
        """Losses made inside stages."""
        every = ((stage, watcher.losses.own.get(module)) for stage, (watcher, module) in self._stages.items())
        return {stage: one for stage, one in every if one is not None}

    def comm_hooks(self, own: RankStages) -> dict[str, str]:
        """Return the names of DDP's communication hooks in this rank's ``own`` stages, except for plain averaging."""
        found: dict[str, str] = {}
        for stage, (watcher, module) in self._stages.items():
            if (replicas := watcher.replicas(module)) is None:
                continue
            if hooks := [one for one, _ in replicas._comm_hooks]:
                name = getattr(hooks[-1], "__qualname__", type(hooks[-1]).__qualname__)
                averages = hooks[-1] is default_hooks.allreduce_hook
            else:
                logged: dict[str, object] = replicas._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # in torch
                name = str(logged.get("comm_hook", ""))
                averages = name.endswith("ALLREDUCE")
            if name and not averages:
                found |= {own.rename(stage, one): name for one, _ in module.named_parameters(remove_duplicate=False)}
        return found

    def close(self) -> None:
        """From now on watch nothing."""
        for watcher, _ in self._stages.values():
            watcher.close()


class Begun:
    """Nonzero gradients of a rank at the start of a step; ``keep`` copies a tensor."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        self._keep = keep
        self._kept: dict[str, Tensor] = {}

    def take(self, gradients: Mapping[str, Any]) -> None:
        """Replace the declared initial gradients by these, by name; of shards, the local part."""
        tensors = {name: local_tensor(one) for name, one in gradients.items() if isinstance(one, Tensor)}
        self._kept = {name: self._keep(one) for name, one in tensors.items() if is_plain(one) and any_nonzero(one)}

    def get(self, name: str) -> Tensor | None:
        """Return an initial gradient; None for zero or absent."""
        return self._kept.get(name)

    def has_grown(self, name: str, gradient: Tensor | None) -> bool:
        """True if the step added to this gradient."""
        now = None if gradient is None else dense(local_tensor(gradient))
        if now is None or not any_nonzero(now):
            return False
        begun = self._kept.get(name)
        return begun is None or not torch.equal(begun.to(now.device), now)

    def check_called(self, own: RankStages, calls: Mapping[int, Sequence[Call]]) -> None:
        """Raise ``RecordError`` for a stage that computed outside observed ``calls``."""
        for stage, module in own.modules.items():
            trained = {own.rename(stage, n): one.grad for n, one in module.named_parameters() if one.requires_grad}
            if not calls[stage] and (not trained or any(self.has_grown(*pair) for pair in trained.items())):
                raise RecordError(_UNSEEN.format(stage))

    def note_elsewhere(
        self, own: RankStages, left: Mapping[str, Any], stage: StageRerun, wrote: Callable[[Tensor], bool]
    ) -> None:
        """Note gradients that differ from the backwards through ``stage``.

        left: this rank's gradients, by the model's names. wrote: whether the stage, run again, wrote to a tensor.
        """
        written = list[str]()
        for name in stage.single_names:
            gradient = left.get(full := own.rename(stage.stage, name))
            gradient = getattr(gradient, "part", gradient)
            if isinstance(gradient, Tensor) and wrote(gradient):
                written.append(name)
            elif name in stage.unreached and self.has_grown(full, gradient):
                written.append(name)
        if written and stage.links and not any(link.obstacle for link in stage.links):
            reason = _WRITTEN.format(first_few(written), stage.stage)
            stage.links[0] = replace(stage.links[0], obstacle=reason)


class EarlyStep:
    """The first step of an optimizer that holds some of the parameters, with their gradients at the time."""

    def __init__(self) -> None:
        self._fence = Fence()
        self._close: Callable[[], None] = lambda: None
        self._then: list[tuple[Tensor, Tensor | None, int | None]] | None = None
        self._inside = False  # a backward

    def open(self, parameters: Iterable[Tensor]) -> None:
        """Start observing."""
        own = {id(one): one for one in parameters}

        def note_step(optimizer: Optimizer, arguments: Any, named: Any) -> None:
            held = (one for group in optimizer.param_groups for one in group["params"])
            if self._then is None and any(id(one) in own for one in held):
                self._then = [
                    (one, one.grad, one.grad if one.grad is None else version(one.grad)) for one in own.values()
                ]
                self._inside = is_inside_a_backward()

        self._close = register_optimizer_step_post_hook(self._fence.around(note_step)).remove

    def close(self) -> None:
        """From now on note nothing."""
        self._close()

    def check(self) -> None:
        """Raise ``RecordError`` if it came too early, or inside a backward.

        If gradients grew after it, it came too early: a fault of the step itself.
        """
        if self._fence.broken:
            raise RecordError(f"the steps of optimizers were not observed: {self._fence.broken}")
        then = self._then
        over = then is not None and all(
            one.grad is None or (one.grad is gradient and version(one.grad) == was) for one, gradient, was in then
        )
        if self._inside or over:
            raise RecordError(_EARLY)
