"""Collection on a rank during a step: stages' calls, initial gradients, and optimizer steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeproof.core.observe.backward_lines import is_inside_a_backward
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.elements import any_nonzero, version
from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.own_losses import OwnLoss
from pipeproof.core.observe.shards import is_plain, local_tensor
from pipeproof.core.observe.watching import Watcher
from pipeproof.pipeline.sizes import first_few
from pipeproof.records.rank_part import RankStages
from pipeproof.records.record import RecordError
from pipeproof.reference.step import dense
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.link import StageCalls
from pipeproof.wings.composed.rerun import StageRerun

_UNSEEN = (
    "no call of stage {}'s module was observed: pass the module that is called, and call it itself, not its forward; "
    "compile it by torch.compile and pass what that returns, or compile the modules in it"
)
_SILENT = (
    "stage {} has parameters to train, and ran without gradients, as under no_grad: call requires_grad_(False) on "
    "them, if that is meant"
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
        self._modules: dict[int, nn.Module] = {}
        self._watchers: dict[int, Watcher] = {}

    def watch(self, stage: int, module: nn.Module, *, kept: bool) -> None:
        """Watch ``stage`` from now on. ``kept``: keep its calls for reruns."""
        watcher = Watcher(keep=self._by.keep if kept else None, generators=self._by.generators, linked=True)
        self._modules[stage], self._watchers[stage] = module, self._saw or watcher
        self._watchers[stage].watch(module)

    def calls(self, microbatches: int) -> dict[int, list[Call]]:
        """Return each stage's calls about microbatches, given their number."""
        warmup, found = self._by.contract.warmup, dict[int, list[Call]]()
        for stage, watcher, module in self._each():
            calls = watcher.calls(module, warmup=warmup) or []
            trained = [call for call in calls if call.ran]
            several = len(trained) >= microbatches or len(calls) > microbatches
            found[stage] = trained if several and not warmup else calls
        for stage, loss in self.own_losses.items():
            found[stage] = [_with_own_loss(call, apart=loss.apart) for call in found[stage]]
        return found

    @property
    def unseen(self) -> dict[int, str]:
        """Reasons for incomplete observation, by stage."""
        return {stage: why for stage, watcher, module in self._each() if (why := watcher.unseen(module))}

    @property
    def arguments(self) -> list[object]:
        """Non-tensor arguments of the calls kept."""
        every = (call.again for _, watcher, module in self._each() for call in watcher.calls(module) or ())
        return [again.others for again in every if again is not None]

    def public_calls(self, rank: int, calls: Mapping[int, Sequence[Call]]) -> dict[int, StageCalls]:
        """Return ``calls`` on this ``rank`` in the form sent to other ranks: without the means to rerun them."""
        found = {}
        for stage, watcher, module in self._each():
            trains = any(one.requires_grad for one in module.parameters())
            alone = tuple(replace(call, again=None) for call in calls[stage])
            # For inner stages, these losses lie outside all stages.
            found[stage] = StageCalls(rank, alone, outside=watcher.losses.outside(module), trains=trains)
        return found

    @property
    def own_losses(self) -> dict[int, OwnLoss]:
        """Losses made inside stages."""
        every = ((stage, watcher.losses.of(module)) for stage, watcher, module in self._each())
        return {stage: one for stage, one in every if one is not None}

    def comm_hooks(self, own: RankStages) -> dict[str, str]:
        """Return the DDP communication hooks of this rank's ``own`` stages, by parameter name."""
        found: dict[str, str] = {}
        for stage, watcher, module in self._each():
            replicas = watcher.replicas(module)
            if replicas is not None and (hook := _hook_of(replicas)):
                found |= {own.rename(stage, name): hook for name, _ in module.named_parameters(remove_duplicate=False)}
        return found

    def close(self) -> None:
        """From now on watch nothing."""
        for watcher in self._watchers.values():
            watcher.close()

    def _each(self) -> Iterator[tuple[int, Watcher, nn.Module]]:
        return ((stage, self._watchers[stage], module) for stage, module in self._modules.items())


def _with_own_loss(call: Call, *, apart: bool) -> Call:
    """Return ``call`` of a stage with its own loss, if gradients handed back went unobserved: a backward ``apart``.

    The same holds if an input's gradient was asked for earlier, for example for a gradient penalty.
    """
    several = any(len(those) > 1 for (is_output, _), those in call.parts.items() if not is_output)
    parts = {at: those for at, those in call.parts.items() if at[0]}
    return replace(call, input_gradients={}, in_parts={}, parts=parts) if apart or several else call


def _hook_of(replicas: DistributedDataParallel) -> str:
    """Return the name of DDP's communication hook; empty for plain averaging."""
    hooks = [hook for hook, _ in replicas._comm_hooks]
    if hooks:
        name = getattr(hooks[-1], "__qualname__", type(hooks[-1]).__qualname__)
        return "" if hooks[-1] is default_hooks.allreduce_hook else name
    logged: dict[str, object] = replicas._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # in torch
    built_in = str(logged.get("comm_hook", ""))
    return "" if built_in.endswith("ALLREDUCE") else built_in


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

    def stages_without_gradients(self, own: RankStages, calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
        """Yield trainable stages that ran without gradients."""
        for stage, module in own.modules.items():
            silent = bool(calls[stage]) and all(call.silent and not call.ran for call in calls[stage])
            if silent and any(one.requires_grad for one in module.parameters()):
                yield _SILENT.format(stage)

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
                self._then = [(one, one.grad, _version(one.grad)) for one in own.values()]
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
            one.grad is None or (one.grad is gradient and _version(gradient) == was) for one, gradient, was in then
        )
        if self._inside or over:
            raise RecordError(_EARLY)


def _version(gradient: Tensor | None) -> int | None:
    return None if gradient is None else version(gradient)
