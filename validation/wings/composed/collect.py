"""What a rank collects in a step: its stages' calls, the gradients before them, and steps of optimizers."""

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
from pipeproof.core.observe.shards import held_here, is_plain
from pipeproof.core.observe.watching import Watcher
from pipeproof.pipeline.sizes import first_few
from pipeproof.records.rank_part import RankStages
from pipeproof.records.record import RecordError
from pipeproof.reference.step import dense
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.link import StageCalls
from pipeproof.wings.composed.rerun import StageRerun

_UNSEEN = (
    "no call of stage {}'s module was seen: pass the module that is called, and call it itself, not its forward; "
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
    """A rank's stages, each with a watcher of its own, or all with the one that ``saw`` a step that is over."""

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
        """Why not all was seen of a stage, by stage."""
        return {stage: why for stage, watcher, module in self._each() if (why := watcher.unseen(module))}

    @property
    def arguments(self) -> list[object]:
        """What is no tensor of what was given to calls that are kept."""
        every = (call.again for _, watcher, module in self._each() for call in watcher.calls(module) or ())
        return [again.others for again in every if again is not None]

    def told(self, rank: int, calls: Mapping[int, Sequence[Call]]) -> dict[int, StageCalls]:
        """What other ranks are told of the ``calls`` of stages on this ``rank``: all but what runs them again."""
        found = {}
        for stage, watcher, module in self._each():
            trains = any(one.requires_grad for one in module.parameters())
            alone = tuple(replace(call, again=None) for call in calls[stage])
            # Of inner stages, these losses are outside of all.
            found[stage] = StageCalls(rank, alone, outside=watcher.losses.outside(module), trains=trains)
        return found

    @property
    def own_losses(self) -> dict[int, OwnLoss]:
        """The losses that stages have of their own."""
        every = ((stage, watcher.losses.of(module)) for stage, watcher, module in self._each())
        return {stage: one for stage, one in every if one is not None}

    def comm_hooks(self, own: RankStages) -> dict[str, str]:
        """The hooks through which DDP reduces the gradients of this rank's ``own`` stages, by the parameter's name."""
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
    """``call`` of a stage with a loss of its own, if what it handed back was not seen: as in a backward ``apart``.

    Or an input's gradient was asked for before, as for a loss that punishes it: which was handed back is not known.
    """
    several = any(len(those) > 1 for (is_output, _), those in call.parts.items() if not is_output)
    parts = {at: those for at, those in call.parts.items() if at[0]}
    return replace(call, input_gradients={}, in_parts={}, parts=parts) if apart or several else call


def _hook_of(replicas: DistributedDataParallel) -> str:
    """The name of the hook through which it reduces gradients; empty where it averages them."""
    hooks = [hook for hook, _ in replicas._comm_hooks]
    if hooks:
        name = getattr(hooks[-1], "__qualname__", type(hooks[-1]).__qualname__)
        return "" if hooks[-1] is default_hooks.allreduce_hook else name
    logged: dict[str, object] = replicas._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # in torch
    built_in = str(logged.get("comm_hook", ""))
    return "" if built_in.endswith("ALLREDUCE") else built_in


class Begun:
    """The gradients of a rank that were not zero when its step began; ``keep`` copies one."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        self._keep = keep
        self._kept: dict[str, Tensor] = {}

    def take(self, gradients: Mapping[str, Any]) -> None:
        """The step begins with these, by name, in place of what it was said to begin with; of shards with its own."""
        tensors = {name: held_here(one) for name, one in gradients.items() if isinstance(one, Tensor)}
        self._kept = {name: self._keep(one) for name, one in tensors.items() if is_plain(one) and any_nonzero(one)}

    def get(self, name: str) -> Tensor | None:
        """What one was; None where it was zero, or none."""
        return self._kept.get(name)

    def has_grown(self, name: str, gradient: Tensor | None) -> bool:
        """Whether anything was added to it since."""
        now = None if gradient is None else dense(held_here(gradient))
        if now is None or not any_nonzero(now):
            return False
        begun = self._kept.get(name)
        return begun is None or not torch.equal(begun.to(now.device), now)

    def check_called(self, own: RankStages, calls: Mapping[int, Sequence[Call]]) -> None:
        """Raise ``RecordError`` for a stage that computes in no ``calls`` that are seen."""
        for stage, module in own.modules.items():
            trained = {own.rename(stage, n): one.grad for n, one in module.named_parameters() if one.requires_grad}
            if not calls[stage] and (not trained or any(self.has_grown(*pair) for pair in trained.items())):
                raise RecordError(_UNSEEN.format(stage))

    def without_gradients(self, own: RankStages, calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
        """Which stages have something to train, and ran without gradients."""
        for stage, module in own.modules.items():
            silent = bool(calls[stage]) and all(call.silent and not call.ran for call in calls[stage])
            if silent and any(one.requires_grad for one in module.parameters()):
                yield _SILENT.format(stage)

    def note_elsewhere(
        self, own: RankStages, left: Mapping[str, Any], stage: StageRerun, wrote: Callable[[Tensor], bool]
    ) -> None:
        """Note where gradients are not what backwards through ``stage`` give.

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
            told = _WRITTEN.format(first_few(written), stage.stage)
            stage.links[0] = replace(stage.links[0], obstacle=told)


class EarlyStep:
    """Notes the first step of an optimizer that holds any of some parameters, and their gradients as they were then."""

    def __init__(self) -> None:
        self._fence = Fence()
        self._close: Callable[[], None] = lambda: None
        self._then: list[tuple[Tensor, Tensor | None, int | None]] | None = None
        self._inside = False  # a backward

    def open(self, parameters: Iterable[Tensor]) -> None:
        """From now on note it."""
        own = {id(one): one for one in parameters}

        def stepped(optimizer: Optimizer, arguments: Any, named: Any) -> None:
            held = (one for group in optimizer.param_groups for one in group["params"])
            if self._then is None and any(id(one) in own for one in held):
                self._then = [(one, one.grad, _version(one.grad)) for one in own.values()]
                self._inside = is_inside_a_backward()

        self._close = register_optimizer_step_post_hook(self._fence.around(stepped)).remove

    def close(self) -> None:
        """From now on note nothing."""
        self._close()

    def check(self) -> None:
        """Raise ``RecordError`` if it came too early, or inside a backward.

        Where gradients grew after it, it came in the midst of the step: that is a fault of the step itself.
        """
        if self._fence.broken:
            raise RecordError(f"the steps of optimizers were not seen: {self._fence.broken}")
        then = self._then
        over = then is not None and all(
            one.grad is None or (one.grad is gradient and _version(gradient) == was) for one, gradient, was in then
        )
        if self._inside or over:
            raise RecordError(_EARLY)


def _version(gradient: Tensor | None) -> int | None:
    return None if gradient is None else version(gradient)
