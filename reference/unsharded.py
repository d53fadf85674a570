"""A stage that torch cut among ranks, put together on one of them: as it was before, with whole weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pipeproof.reference.copied import copied, hooks_of, tensors_shared

_FSDP = "torch.distributed.fsdp"  # whose classes and hooks are taken away
_TENSORS = "torch.distributed.tensor"  # whose hooks make DTensors of what passes, and are taken away too
_OWN = "__composable_api_state_key"  # under what begins so fully_shard keeps its state in a module


def is_wrapped(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on ``module`` itself."""
    return _is(type(module), "FSDPModule")


def is_flat(module: nn.Module) -> bool:
    """Whether it is of the older kind, whose weights lie in flat tensors."""
    return _is(type(module), "FullyShardedDataParallel")


def is_gathered(module: nn.Module) -> bool:
    """Whether ``fully_shard`` has whole weights in it, to be trained, so that nothing tells where their parts lie."""
    return any(one.requires_grad and not hasattr(one, "placements") for one in under_fully_shard(module).values())


def under_fully_shard(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters in those parts of ``module`` on which ``fully_shard`` was called."""
    policies, named = _policies(module), module.named_parameters(remove_duplicate=False)
    return {name: one for name, one in named if _owner(name, policies) is not None}


def let_go(module: nn.Module) -> None:
    """Have ``fully_shard`` free whole weights, as for a checkpoint: after an evaluation it still has them.

    Who takes those for the parameters reads in the next step what is freed by then, which ends the process. No bit
    changes.
    """
    for part in module.modules():
        if is_wrapped(part):
            part.reshard()  # type: ignore[operator]  # of FSDPModule


def reduced_in(module: nn.Module) -> dict[str, torch.dtype]:
    """The types in which ``fully_shard`` reduces gradients, by the names of parameters that have a wider one."""
    policies, found = _policies(module), dict[str, torch.dtype]()
    for name, one in module.named_parameters(remove_duplicate=False):
        policy = policies.get(_owner(name, policies) or "")
        narrow = None if policy is None else policy.reduce_dtype
        if narrow is not None and one.is_floating_point() and torch.finfo(narrow).eps > torch.finfo(one.dtype).eps:
            found[name] = narrow
    return found


def unsharded(module: nn.Module, whole: Mapping[str, Tensor]) -> nn.Module:
    """``module`` once more without what ``fully_shard`` and ``parallelize_module`` made of it.

    It is on ``whole`` weights, by their names there.

    Others it shares with ``module``, as it does all that is no tensor and cannot be copied. It computes in the types
    that the policies of ``fully_shard`` say, and its weights have these types.
    """
    policies = _policies(module)
    named = dict(module.named_parameters(remove_duplicate=False))
    instead = dict[int, object]()
    for name, one in whole.items():
        own, policy = named[name], policies.get(_owner(name, policies) or "")
        instead[id(own)] = nn.Parameter(_narrowed(one, policy), requires_grad=own.requires_grad)
    others = [one for one in (*named.values(), *module.buffers()) if id(one) not in instead]
    with _as_found(module), tensors_shared():
        made = copied(module, sharing=(*others, *hooks_of(module)), instead=instead)
    for name, policy in policies.items():
        _cast(made.get_submodule(name), policy)
    return made


def _policies(module: nn.Module) -> dict[str, Any]:
    """By the name of each part on which ``fully_shard`` was called, its policy on types."""
    return {name: _policy(part) for name, part in module.named_modules() if is_wrapped(part)}


def _policy(part: nn.Module) -> Any:
    return part._get_fsdp_state()._mp_policy  # type: ignore[operator]  # torch has no public way to ask


def _owner(name: str, policies: Mapping[str, Any]) -> str | None:
    """The part that gathers a parameter: the innermost around it on which ``fully_shard`` was called."""
    around = [one for one in policies if not one or name.startswith(f"{one}.")]
    return max(around, key=len, default=None)


def _narrowed(whole: Tensor, policy: Any) -> Tensor:
    dtype = None if policy is None else policy.param_dtype
    return whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole


def _cast(part: nn.Module, policy: Any) -> None:
    """Have what goes into ``part`` and what comes out of it cast as ``policy`` says."""
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        to = partial(tree_map, partial(_floats_in, policy.param_dtype))
        part.register_forward_pre_hook(lambda _, given, named: (to(given), to(named)), prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        out: Callable[[Any], Any] = partial(tree_map, partial(_floats_in, policy.output_dtype))
        part.register_forward_hook(lambda _, given, output: out(output))


def _floats_in(dtype: torch.dtype, one: Any) -> Any:
    return one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one


class _Whole:
    """In the place of ``FSDPModule``, for a forward that calls its methods: the weights are there."""

    def unshard(self, async_op: bool = False) -> "_Whole | None":
        """Nothing is to be waited for."""
        return self if async_op else None

    def wait(self) -> None:
        """It is there."""

    def reshard(self) -> None:
        """It stays."""


@cache
def _whole_class(kind: type) -> type:
    """``kind`` with methods that do nothing, for a module on which ``fully_shard`` was called."""
    return type(kind.__name__, (kind, _Whole), {"__module__": kind.__module__})


@contextmanager
def _as_found(module: nn.Module) -> Iterator[None]:
    """While this is open, the parts of ``module`` are of the classes that torch found, without its hooks."""
    kinds = [(part, type(part)) for part in module.modules()]
    members = [(part, dict(part.__dict__)) for part, _ in kinds]
    try:
        for part, kind in kinds:
            if is_wrapped(part):
                part.__class__ = _whole_class(next(base for base in kind.__mro__ if not _is(base, "FSDPModule")))
            own = part.__dict__
            for name in [one for one in own if _is_wrapped_method(own[one])]:
                del own[name]
            for name in [one for one in own if one.startswith(_OWN)]:
                del own[name]
            for name in [one for one in own if one.endswith("_hooks")]:
                own[name] = type(own[name])((k, hook) for k, hook in own[name].items() if not _is_cutting(hook))
        yield
    finally:
        for part, kind in kinds:
            if type(part) is not kind:
                part.__class__ = kind
        for part, before in members:
            part.__dict__.clear()
            part.__dict__.update(before)


def _is(kind: type, name: str) -> bool:
    """Whether ``kind`` is of the class of torch's with this name: to import that takes seconds where nobody uses it."""
    return any(_is_fsdps(base) and base.__name__ == name for base in kind.__mro__)


def _is_fsdps(one: object) -> bool:
    return str(getattr(one, "__module__", "")).startswith(_FSDP)


def _is_cutting(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith((_FSDP, _TENSORS))


def _is_wrapped_method(one: object) -> bool:
    """Whether it is what ``register_fsdp_forward_method`` puts in place of a method."""
    return isinstance(one, MethodType) and "distributed/fsdp" in one.__func__.__code__.co_filename
