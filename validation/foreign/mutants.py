"""Faults that any training step may be given, whoever wrote it: planted where torch is called, for as long as one test.

Each notes how often it changed anything. What a step does not call, or calls by names that it took before, is not hit.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipeproof.foreign.planted import Planted
from pipeproof.foreign.reductions import Changed, Hit, Left, differ, is_sum, several
from pipeproof.observers.elements import is_rounded
from pipeproof.observers.shards import held_here

Plant = Callable[[Planted], Any]  # a context manager, while which is open the fault is there


@dataclass(frozen=True)
class Mutant:
    """One fault: what it is, how it is planted, and whether on all ranks at once, as where a line is missing.

    ``of_sums``: it is in sums over ranks.
    """

    summary: str
    plant: Plant
    everywhere: bool = False
    of_sums: bool = False


@contextmanager
def _patched(holder: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """While this is open, ``make`` has made another of what ``holder`` calls ``name``."""
    kept = vars(holder)[name]
    setattr(holder, name, make(getattr(holder, name)))
    try:
        yield
    finally:
        setattr(holder, name, kept)


Change = Callable[[Tensor, int], Tensor]  # of a tensor, and how many came before it


def _messages(change: Change, *, at: int | None = None) -> Plant:
    """Of what is sent in floating point the message number ``at``, or each, is changed on its way."""

    def plant(hit: Hit) -> Any:
        sent: list[list[Tensor]] = []  # kept: a transport may read them later

        def make(send: Any) -> Any:
            def changed(group: Any, tensors: list[Tensor], *more: Any) -> Any:
                if any(one.is_floating_point() for one in tensors):
                    number = len(sent)
                    sent.append([one.detach().clone() for one in tensors])
                    if at in (None, number):
                        made = [change(one, number) for one in sent[-1]]
                        if any(map(differ, made, tensors)):
                            hit()
                            sent.append(made)
                            tensors = made
                return send(group, tensors, *more)

            return changed

        return _patched(dist.ProcessGroup, "send", make)

    return plant


def _repeated() -> Plant:
    """A message has the content of the first of its form, as soon as that is another."""

    def plant(hit: Planted) -> Any:
        first: dict[object, Tensor] = {}
        done: list[Tensor] = []

        def change(tensor: Tensor, number: int) -> Tensor:
            form = tuple(tensor.shape), tensor.dtype
            other = first.setdefault(form, tensor)
            if not done and differ(other, tensor):
                done.append(other)
                return other
            return tensor

        return _messages(change)(hit)

    return plant


def _reductions(left: Left) -> Plant:
    """``left``: what becomes of a tensor and of what its reduction over ranks makes of it."""

    def plant(hit: Hit) -> Any:
        def make(allreduce: Any) -> Any:
            def changed(group: Any, tensors: Any, *more: Any, **named: Any) -> Any:
                if group.size() < 2 or not is_sum(tensors, *more, **named):
                    return allreduce(group, tensors, *more, **named)
                before = [one.detach().clone() for one in several(tensors)]
                work = allreduce(group, tensors, *more, **named)
                return None if work is None else Changed(work, several(tensors), before, left, hit)

            return changed

        return _patched(dist.ProcessGroup, "allreduce", make)

    return plant


def _backwards(change: Callable[[Callable[..., None], dict[str, Any], int], bool]) -> Plant:
    """``change`` does a backward of what it is given by name otherwise, and says whether it did."""

    def plant(hit: Hit) -> Any:
        def make(backward: Any) -> Any:
            count, form = [0], inspect.signature(backward)

            def changed(*arguments: Any, **named: Any) -> None:
                count[0] += 1
                if change(backward, form.bind(*arguments, **named).arguments, count[0] - 1):
                    hit()
                else:
                    backward(*arguments, **named)

            return changed

        return _patched(torch.autograd, "backward", make)

    return plant


def _left_out(backward: Callable[..., None], given: dict[str, Any], number: int) -> bool:
    return number == 1 and not _begins_with_zeros(given)


def _done_twice(backward: Callable[..., None], given: dict[str, Any], number: int) -> bool:
    if number or _begins_with_zeros(given):
        return False
    backward(**{**given, "retain_graph": True})
    backward(**given)
    return True


def _doubled_flow(backward: Callable[..., None], given: dict[str, Any], number: int) -> bool:
    if _begins_with_zeros(given):
        return False
    tensors = several(given["tensors"])
    flows = several(given.get("grad_tensors")) or [None] * len(tensors)
    ones = [torch.ones_like(one) if flow is None else flow for one, flow in zip(tensors, flows, strict=True)]
    backward(**{**given, "tensors": tensors, "grad_tensors": [2 * one for one in ones]})
    return True


def _begins_with_zeros(given: dict[str, Any]) -> bool:
    flows = several(given.get("grad_tensors"))
    return bool(flows) and not any(flow is None or bool(flow.any()) for flow in flows)


def _gradients(change: Callable[[Tensor], Tensor], *, most: int | None = None) -> Plant:
    """What flows to the first parameters that are used, at most so many, is changed."""

    @contextmanager
    def plant(hit: Hit) -> Iterator[None]:
        seen: dict[int, nn.Parameter] = {}

        def flowed(gradient: Tensor) -> Tensor:
            made = change(gradient)
            if differ(made, gradient):
                hit()
            return made

        def look(module: nn.Module, arguments: Any) -> None:
            for parameter in module._parameters.values():
                room = most is None or len(seen) < most
                if parameter is not None and parameter.requires_grad and room and id(parameter) not in seen:
                    seen[id(parameter)] = parameter
                    hooks.append(parameter.register_hook(flowed))  # type: ignore[no-untyped-call]  # in torch

        hooks = [register_module_forward_pre_hook(look)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    return plant


@contextmanager
def _not_cleared(hit: Hit) -> Iterator[None]:
    def make(clear: Any) -> Any:
        def left(held: Any, *arguments: Any, **named: Any) -> None:
            if any(one.grad is not None and bool(one.grad.any()) for one in _parameters(held)):
                hit()

        return left

    with _patched(nn.Module, "zero_grad", make), _patched(torch.optim.Optimizer, "zero_grad", make):
        yield


def _parameters(held: Any) -> list[Tensor]:
    if isinstance(held, nn.Module):
        return list(held.parameters())
    return [one for group in held.param_groups for one in group["params"]]


def _clipping(change: Callable[[Any, dict[str, Any], Hit], Any]) -> Plant:
    @contextmanager
    def plant(hit: Hit) -> Iterator[None]:
        def make(clip: Any) -> Any:
            def changed(*arguments: Any, **named: Any) -> Any:
                return change(clip, form.bind(*arguments, **named).arguments, hit)

            form = inspect.signature(clip)
            return changed

        with _patched(nn.utils, "clip_grad_norm_", make), _patched(nn.utils.clip_grad, "clip_grad_norm_", make):
            yield

    return plant


def _unclipped(clip: Any, given: dict[str, Any], hit: Hit) -> Any:
    given["parameters"] = several(given["parameters"])  # it may be what gives them once
    before = [(one.grad, one.grad.detach().clone()) for one in given["parameters"] if one.grad is not None]
    norm = clip(**given)
    for gradient, kept in before:
        if differ(gradient, kept):
            hit()
            gradient.data.copy_(kept)
    return norm


def _doubled_norm(clip: Any, given: dict[str, Any], hit: Hit) -> Any:
    norm = clip(**given)
    here = held_here(norm.detach())  # of a DTensor, which is the whole's part that others do not hear of
    once = here.clone()
    here.mul_(2)
    if differ(here, once):
        hit()
    return norm


@contextmanager
def _not_updated(hit: Hit) -> Iterator[None]:
    before: dict[int, list[Tensor]] = {}

    def keep(optimizer: Any, *_: Any) -> None:
        before[id(optimizer)] = [one.detach().clone() for one in _parameters(optimizer)]

    def take_back(optimizer: Any, *_: Any) -> None:
        for one, kept in zip(_parameters(optimizer), before.pop(id(optimizer)), strict=True):
            if differ(one, kept):
                hit()
                one.data.copy_(kept)

    with _hooked(register_optimizer_step_pre_hook(keep), register_optimizer_step_post_hook(take_back)):
        yield


@contextmanager
def _updated_twice(hit: Hit) -> Iterator[None]:
    within: list[bool] = []

    def again(optimizer: Any, given: Any, named: Any) -> None:
        if not within:
            within.append(True)
            once = [one.detach().clone() for one in _parameters(optimizer)]
            optimizer.step(*given[1:], **named)  # it may want a closure
            if any(map(differ, _parameters(optimizer), once)):
                hit()
            within.clear()

    with _hooked(register_optimizer_step_post_hook(again)):
        yield


@contextmanager
def _nudged(hit: Planted) -> Iterator[None]:
    done: list[Tensor] = []

    def look(module: nn.Module, arguments: Any) -> None:
        own = [one for one in module._parameters.values() if one is not None and is_rounded(one.dtype)]
        for one in own if not done else ():
            nudged = one.detach() * 1.01
            if not done and differ(nudged, one):
                done.append(one)
                hit.leaves(partial(_put_back, one, one.detach().clone()))
                hit()
                one.data.copy_(nudged)

    with _hooked(register_module_forward_pre_hook(look)):
        yield


def _put_back(weight: Tensor, before: Tensor) -> None:
    if weight.shape == before.shape:
        weight.data.copy_(before)


@contextmanager
def _rounded_outputs(hit: Hit) -> Iterator[None]:
    def look(module: nn.Module, arguments: Any, output: Any) -> Any:
        if module._parameters and isinstance(output, Tensor) and output.dtype is torch.float32:
            rounded = _through_bf16(output)
            if differ(rounded, output):
                hit()
                return rounded
        return None

    with _hooked(register_module_forward_hook(look)):
        yield


@contextmanager
def _evaluating(hit: Planted) -> Iterator[None]:
    def look(module: nn.Module, arguments: Any) -> None:
        if module.training and _is_other_in_training(module):
            hit()
            hit.leaves(partial(setattr, module, "training", True))
            module.training = False

    with _hooked(register_module_forward_pre_hook(look)):
        yield


def _is_other_in_training(module: nn.Module) -> bool:
    """Whether this is a dropout that drops anything, or a layer whose statistics run."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return bool(module.dropout > 0 and module.num_layers > 1)  # the last layer's outputs are not dropped
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout > 0)
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None


@contextmanager
def _hooked(*hooks: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _of_sums(summary: str, left: Left, *, everywhere: bool = True) -> Mutant:
    return Mutant(summary, _reductions(left), everywhere=everywhere, of_sums=True)


def _through_bf16(tensor: Tensor, number: int = 0) -> Tensor:
    if tensor.is_complex():
        return torch.complex(_through_bf16(tensor.real), _through_bf16(tensor.imag))
    return tensor.bfloat16().to(tensor.dtype)


MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {
        "message-zero": Mutant("a message is zeros", _messages(lambda one, _: torch.zeros_like(one), at=1)),
        "message-doubled": Mutant("a message is doubled", _messages(lambda one, _: 2 * one, at=1)),
        "message-repeated": Mutant("a message is the one before it", _repeated()),
        "message-rounded": Mutant("messages go through bf16", _messages(_through_bf16)),
        "message-noisy": Mutant("messages are off by a thousandth", _messages(lambda one, _: one * 1.001)),
        "reduction-left-out": _of_sums("sums over ranks are left out", lambda one, _: one),
        "reduction-doubled": _of_sums("sums over ranks are doubled", lambda _, all_: 2 * all_),
        "reduction-halved": _of_sums("sums over ranks are halved", lambda _, all_: all_ / 2),
        "reduction-lost": _of_sums(
            "one rank keeps its own part of sums over ranks", lambda one, _: one, everywhere=False
        ),
        "backward-left-out": Mutant("a backward is left out", _backwards(_left_out)),
        "backward-doubled": Mutant("a backward is done twice", _backwards(_done_twice)),
        "flow-doubled": Mutant("backwards begin with twice the gradient", _backwards(_doubled_flow)),
        "gradient-lost": Mutant("a parameter's gradient is zero", _gradients(torch.zeros_like, most=1)),
        "gradient-turned": Mutant("a parameter's gradient has the other sign", _gradients(torch.neg, most=1)),
        "gradient-doubled": Mutant("all gradients of a rank are doubled", _gradients(lambda one: 2 * one)),
        "gradient-rounded": Mutant("gradients of a rank go through bf16", _gradients(_through_bf16)),
        "gradients-not-cleared": Mutant("gradients are not cleared", _not_cleared),
        "clipping-left-out": Mutant("gradients are not clipped", _clipping(_unclipped)),
        "norm-doubled": Mutant("the norm that is told is doubled", _clipping(_doubled_norm)),
        "update-left-out": Mutant("a rank's optimizer does nothing", _not_updated),
        "update-doubled": Mutant("a rank's optimizer steps twice", _updated_twice),
        "weight-nudged": Mutant("a weight is off by a hundredth", _nudged),
        "outputs-rounded": Mutant("a rank's layers put out bf16", _rounded_outputs),
        "evaluating": Mutant("a rank's dropout and statistics are off", _evaluating),
    }
)
