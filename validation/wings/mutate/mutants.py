"""Faults for every training step: planted into torch functions for the duration of one test.

Steps that do not call these, or took references before, stay unchanged.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipeproof.core.observe.elements import is_rounded
from pipeproof.core.observe.shards import local_tensor
from pipeproof.wings.mutate.planting import Plant, Planting, differ, in_place_of, plant_in_hooks, several
from pipeproof.wings.mutate.sums import Change, ChangedSum, is_sum


@dataclass(frozen=True)
class Mutant:
    """One fault: its description, its planting, and whether it is on all ranks, like a missing line of code.

    ``of_sums``: it changes sums over ranks.
    """

    summary: str
    plant: Plant
    everywhere: bool = False
    of_sums: bool = False


def _messages(change: Callable[[Planting, Tensor], Tensor], *, at: int | None = None) -> Plant:
    """Change floating point message number ``at``, or each, on its way."""

    def send(fault: Planting, original: Any, group: Any, tensors: list[Tensor], *more: Any) -> Any:
        if any(one.is_floating_point() for one in tensors) and fault.is_turn(at):
            changed = [change(fault, one.detach().clone()) for one in tensors]
            if any(map(differ, changed, tensors)):
                fault.hits += 1
                fault.memory[fault.hits] = tensors = changed  # a transport may read them later
        return original(group, tensors, *more)

    return in_place_of("send", send, dist.ProcessGroup)


def _as_the_first(fault: Planting, tensor: Tensor) -> Tensor:
    """Return the first message of this form with different content."""
    first: Tensor = fault.memory.setdefault((tuple(tensor.shape), tensor.dtype), tensor)
    return tensor if fault.hits else first


def _sums(summary: str, change: Change, *, everywhere: bool = True) -> Mutant:
    """Change a sum over ranks."""

    def allreduce(fault: Planting, original: Any, group: Any, tensors: Any, *more: Any, **named: Any) -> Any:
        if group.size() < 2 or not is_sum(tensors, *more, **named):
            return original(group, tensors, *more, **named)
        pairs = [(one.detach().clone(), one) for one in several(tensors)]
        work = original(group, tensors, *more, **named)
        return None if work is None else ChangedSum(work, pairs, change, fault)

    plant = in_place_of("allreduce", allreduce, dist.ProcessGroup)
    return Mutant(summary, plant, everywhere=everywhere, of_sums=True)


def _backwards(change: Callable[[Callable[..., None], dict[str, Any]], None], *, at: int | None = None) -> Plant:
    """Replace backward number ``at``, or each, by ``change``, with arguments by name; skips zeros."""

    def backward(fault: Planting, original: Any, *given: Any, **named: Any) -> None:
        arguments = inspect.signature(original).bind(*given, **named).arguments
        flows = several(arguments.get("grad_tensors"))
        flowing = not flows or any(flow is None or bool(flow.any()) for flow in flows)
        if fault.is_turn(at) and flowing:
            change(original, arguments)
            fault.hits += 1
        else:
            original(*given, **named)

    return in_place_of("backward", backward, torch.autograd)


def _run_twice(backward: Callable[..., None], given: dict[str, Any]) -> None:
    backward(**{**given, "retain_graph": True})
    backward(**given)


def _double_flow(backward: Callable[..., None], given: dict[str, Any]) -> None:
    tensors = several(given["tensors"])
    flows = several(given.get("grad_tensors")) or [None] * len(tensors)
    ones = [torch.ones_like(one) if flow is None else flow for one, flow in zip(tensors, flows, strict=True)]
    backward(**{**given, "tensors": tensors, "grad_tensors": [2 * one for one in ones]})


def _not_cleared(fault: Planting, _: Any, holder: Any, *given: Any, **named: Any) -> None:
    if any(one.grad is not None and bool(one.grad.any()) for one in _parameters(holder)):
        fault.hits += 1


def _parameters(holder: Any) -> list[Tensor]:
    if isinstance(holder, nn.Module):
        return list(holder.parameters())
    return [one for group in holder.param_groups for one in group["params"]]


def _skip_clipping(fault: Planting, clip: Any, *given: Any, **named: Any) -> Any:
    arguments = inspect.signature(clip).bind(*given, **named).arguments
    arguments["parameters"] = several(arguments["parameters"])  # perhaps an iterator
    before = [(one.grad, one.grad.detach().clone()) for one in arguments["parameters"] if one.grad is not None]
    norm = clip(**arguments)
    for gradient, whole in before:
        if differ(gradient, whole):
            fault.hits += 1
            gradient.data.copy_(whole)
    return norm


def _double_norm(fault: Planting, clip: Any, *given: Any, **named: Any) -> Any:
    norm = clip(*given, **named)
    here = local_tensor(norm.detach())  # for a DTensor, the local part, changed here alone
    once = here.clone()
    here.mul_(2)
    fault.hits += differ(here, once)
    return norm


def _gradients(change: Callable[[Tensor], Tensor], *, most: int | None = None) -> Plant:
    """Change gradients flowing to the first ``most`` used parameters."""

    def change_flow(fault: Planting, gradient: Tensor) -> Tensor:
        changed = change(gradient)
        fault.hits += differ(changed, gradient)
        return changed

    def look(fault: Planting, module: nn.Module, _: Any) -> None:
        used = fault.memory
        for one in module.parameters(recurse=False):
            if one.requires_grad and id(one) not in used and (most is None or len(used) < most):
                used[id(one)] = one
                hook = one.register_hook(partial(change_flow, fault))  # type: ignore[no-untyped-call]  # in torch
                fault.hooks.callback(hook.remove)

    return plant_in_hooks((register_module_forward_pre_hook, look))


def _keep_weights(fault: Planting, optimizer: Any, *_: Any) -> None:
    fault.memory[id(optimizer)] = [one.detach().clone() for one in _parameters(optimizer)]


def _take_back(fault: Planting, optimizer: Any, *_: Any) -> None:
    for one, old in zip(_parameters(optimizer), fault.memory.pop(id(optimizer)), strict=True):
        if differ(one, old):
            fault.hits += 1
            one.data.copy_(old)


def _step_again(fault: Planting, optimizer: Any, given: Any, named: Any) -> None:
    if not fault.memory:  # otherwise this is the nested step
        fault.memory["once"] = once = [one.detach().clone() for one in _parameters(optimizer)]
        optimizer.step(*given[1:], **named)  # it may want a closure
        fault.hits += any(map(differ, _parameters(optimizer), once))
        fault.memory.clear()


def _nudge(fault: Planting, module: nn.Module, _: Any) -> None:
    for one in module.parameters(recurse=False):
        if not fault.hits and is_rounded(one.dtype) and differ(nudged := one.detach() * 1.01, one):
            fault.hits += 1
            fault.left.callback(_put_back, one, one.detach().clone())
            one.data.copy_(nudged)


def _put_back(weight: Tensor, before: Tensor) -> None:
    if weight.shape == before.shape:
        weight.data.copy_(before)


def _round_output(fault: Planting, module: nn.Module, _: Any, output: Any) -> Any:
    if not (module._parameters and isinstance(output, Tensor) and output.dtype is torch.float32):
        return None
    rounded = _through_bf16(output)
    fault.hits += (changed := differ(rounded, output))
    return rounded if changed else None


def _evaluate(fault: Planting, module: nn.Module, _: Any) -> None:
    """Switch off a dropout with an effect, and a layer with running statistics."""
    effects: dict[type[nn.Module], Callable[[Any], bool]] = {
        nn.modules.dropout._DropoutNd: lambda one: one.p > 0,
        nn.RNNBase: lambda one: one.dropout > 0 and one.num_layers > 1,  # the last layer's outputs are not dropped
        nn.MultiheadAttention: lambda one: one.dropout > 0,
        nn.modules.batchnorm._NormBase: lambda one: one.running_mean is not None,
    }
    if module.training and any(isinstance(module, kind) and other(module) for kind, other in effects.items()):
        fault.hits += 1
        fault.left.callback(setattr, module, "training", True)
        module.training = False


def _through_bf16(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.complex(_through_bf16(tensor.real), _through_bf16(tensor.imag))
    return tensor.bfloat16().to(tensor.dtype)


_CLIP, _CLIPS = "clip_grad_norm_", (nn.utils, nn.utils.clip_grad)
_NO_UPDATE = plant_in_hooks(
    (register_optimizer_step_pre_hook, _keep_weights), (register_optimizer_step_post_hook, _take_back)
)
MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {
        "message-zero": Mutant("a message is zeros", _messages(lambda _, one: torch.zeros_like(one), at=1)),
        "message-doubled": Mutant("a message is doubled", _messages(lambda _, one: 2 * one, at=1)),
        "message-repeated": Mutant("a message is the one before it", _messages(_as_the_first)),
        "message-rounded": Mutant("messages go through bf16", _messages(lambda _, one: _through_bf16(one))),
        "message-noisy": Mutant("messages are off by a thousandth", _messages(lambda _, one: one * 1.001)),
        "reduction-left-out": _sums("sums over ranks are left out", lambda part, _: part),
        "reduction-doubled": _sums("sums over ranks are doubled", lambda _, whole: 2 * whole),
        "reduction-halved": _sums("sums over ranks are halved", lambda _, whole: whole / 2),
        "reduction-lost": _sums(
            "one rank keeps its own part of sums over ranks", lambda part, _: part, everywhere=False
        ),
        "backward-left-out": Mutant("a backward is left out", _backwards(lambda *_: None, at=1)),
        "backward-doubled": Mutant("a backward is done twice", _backwards(_run_twice, at=0)),
        "flow-doubled": Mutant("backwards begin with twice the gradient", _backwards(_double_flow)),
        "gradient-lost": Mutant("a parameter's gradient is zero", _gradients(torch.zeros_like, most=1)),
        "gradient-turned": Mutant("a parameter's gradient has the other sign", _gradients(torch.neg, most=1)),
        "gradient-doubled": Mutant("all gradients of a rank are doubled", _gradients(lambda one: 2 * one)),
        "gradient-rounded": Mutant("gradients of a rank go through bf16", _gradients(_through_bf16)),
        "gradients-not-cleared": Mutant(
            "gradients are not cleared", in_place_of("zero_grad", _not_cleared, nn.Module, torch.optim.Optimizer)
        ),
        "clipping-left-out": Mutant("gradients are not clipped", in_place_of(_CLIP, _skip_clipping, *_CLIPS)),
        "norm-doubled": Mutant("the reported norm is doubled", in_place_of(_CLIP, _double_norm, *_CLIPS)),
        "update-left-out": Mutant("a rank's optimizer does nothing", _NO_UPDATE),
        "update-doubled": Mutant(
            "a rank's optimizer steps twice", plant_in_hooks((register_optimizer_step_post_hook, _step_again))
        ),
        "weight-nudged": Mutant(
            "a weight is off by a hundredth", plant_in_hooks((register_module_forward_pre_hook, _nudge))
        ),
        "outputs-rounded": Mutant(
            "a rank's layers put out bf16", plant_in_hooks((register_module_forward_hook, _round_output))
        ),
        "evaluating": Mutant(
            "a rank's dropout and statistics are off", plant_in_hooks((register_module_forward_pre_hook, _evaluate))
        ),
    }
)
