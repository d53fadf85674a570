"""A stage that torch cut among ranks, reassembled on one rank with whole weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pipeproof.reference.copied import TensorsShared, deep_copy, hooks_of

_FSDP = "torch.distributed.fsdp"  # its classes and hooks are removed
_TENSORS = "torch.distributed.tensor"  # its hooks convert tensors to DTensors, and are removed too
_OWN = "__composable_api_state_key"  # prefix of fully_shard's state in a module


def is_wrapped(module: nn.Module) -> bool:
    """True after ``fully_shard`` on ``module`` itself."""
    return _is(type(module), "FSDPModule")


def is_flat(module: nn.Module) -> bool:
    """True for the older kind, with weights in flat tensors."""
    return _is(type(module), "FullyShardedDataParallel")


def is_gathered(module: nn.Module) -> bool:
    """True if ``fully_shard`` holds whole trainable weights, which hide the places for their parts."""
    return any(one.requires_grad and not hasattr(one, "placements") for one in under_fully_shard(module).values())


def under_fully_shard(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters inside parts under ``fully_shard``."""
    policies, named = _policies(module), module.named_parameters(remove_duplicate=False)
    return {name: one for name, one in named if _owner(name, policies) is not None}


def let_go(module: nn.Module) -> None:
    """Make ``fully_shard`` free whole weights, as for a checkpoint: after an evaluation it still has them.

    Code that takes those for the parameters reads freed memory in the next step, which ends the process. No bit
    changes.
    """
    for part in module.modules():
        if is_wrapped(part):
            part.reshard()  # type: ignore[operator]  # of FSDPModule


def reduction_types(module: nn.Module) -> dict[str, torch.dtype]:
    """Types in which ``fully_shard`` reduces gradients, by name, for parameters with a wider type."""
    policies, found = _policies(module), dict[str, torch.dtype]()
    for name, one in module.named_parameters(remove_duplicate=False):
        policy = policies.get(_owner(name, policies) or "")
        narrow = None if policy is None else policy.reduce_dtype or policy.param_dtype
        if narrow is not None and one.is_floating_point() and torch.finfo(narrow).eps > torch.finfo(one.dtype).eps:
            found[name] = narrow
    return found


def unshard(module: nn.Module, whole: Mapping[str, Tensor]) -> nn.Module:
    """Copy ``module`` without the changes by ``fully_shard`` and ``parallelize_module``, on ``whole`` weights by name.

    It shares other weights with ``module``, and every member that is no tensor and cannot be copied. It computes in the
    types of ``fully_shard``'s policies, and its weights have these types.
    """
    policies = _policies(module)
    named = dict(module.named_parameters(remove_duplicate=False))
    instead = dict[int, object]()
    for name, one in whole.items():
        own, policy = named[name], policies.get(_owner(name, policies) or "")
        narrow = None if policy is None else policy.param_dtype
        value = one if narrow is None else _floats_in(narrow, one)
        instead[id(own)] = nn.Parameter(value, requires_grad=own.requires_grad)
    others = [one for one in (*named.values(), *module.buffers()) if id(one) not in instead]
    with _as_found(module), TensorsShared():
        made = deep_copy(module, sharing=(*others, *hooks_of(module)), instead=instead)
    for name, policy in policies.items():
        _cast(made.get_submodule(name), policy)
    return made


def _policies(module: nn.Module) -> dict[str, Any]:
    """By name, the type policy of each part under ``fully_shard``."""
    parts: Iterable[tuple[str, Any]] = module.named_modules()  # torch has no public way to ask for the policy
    return {name: part._get_fsdp_state()._mp_policy for name, part in parts if is_wrapped(part)}


def _owner(name: str, policies: Mapping[str, Any]) -> str | None:
    """The part that gathers a parameter: the innermost around it under ``fully_shard``."""
    around = [one for one in policies if not one or name.startswith(f"{one}.")]
    return max(around, key=len, default=None)


def _cast(part: nn.Module, policy: Any) -> None:
    """Cast inputs and outputs of ``part`` by ``policy``."""
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        to = partial(tree_map, partial(_floats_in, policy.param_dtype))
        part.register_forward_pre_hook(lambda _, given, named: (to(given), to(named)), prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        out: Callable[[Any], Any] = partial(tree_map, partial(_floats_in, policy.output_dtype))
        part.register_forward_hook(lambda _, given, output: out(output))


def _floats_in(dtype: torch.dtype, one: Any) -> Any:
    return one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one


class _Whole:
    """Replaces ``FSDPModule`` in a forward that calls its methods: the weights exist."""

    def unshard(self, async_op: bool = False) -> "_Whole | None":
        """Return without a wait."""
        return self if async_op else None

    def wait(self) -> None:
        """Wait for nothing."""

    def reshard(self) -> None:
        """Keep the weights."""


@cache
def _whole_class(kind: type) -> type:
    """Make a class like ``kind`` with methods that do nothing, for a module under ``fully_shard``."""
    return type(kind.__name__, (kind, _Whole), {"__module__": kind.__module__})


@contextmanager
def _as_found(module: nn.Module) -> Iterator[None]:
    """Give parts of ``module`` their original classes for a while, without torch's hooks."""
    kinds = [(part, type(part)) for part in module.modules()]
    members = [(part, dict(part.__dict__)) for part, _ in kinds]
    try:
        for part, kind in kinds:
            if is_wrapped(part):
                part.__class__ = _whole_class(next(base for base in kind.__mro__ if not _is(base, "FSDPModule")))
            own = part.__dict__
            for name in [one for one in own if one.startswith(_OWN) or _is_wrapped_method(own[one])]:
                del own[name]
            for name in [one for one in own if one.endswith("_hooks")]:
                own[name] = type(own[name])(
                    (k, hook) for k, hook in own[name].items() if not _is_of(hook, _FSDP, _TENSORS)
                )
        yield
    finally:
        for part, kind in kinds:
            if type(part) is not kind:
                part.__class__ = kind
        for part, before in members:
            part.__dict__.clear()
            part.__dict__.update(before)


def _is(kind: type, name: str) -> bool:
    """True if ``kind`` derives from torch's class with this name, without the slow import."""
    return any(_is_of(base, _FSDP) and base.__name__ == name for base in kind.__mro__)


def _is_of(one: object, *modules: str) -> bool:
    return str(getattr(one, "__module__", "")).startswith(modules)


def _is_wrapped_method(one: object) -> bool:
    """True for a method replaced by ``register_fsdp_forward_method``."""
    return isinstance(one, MethodType) and "distributed/fsdp" in one.__func__.__code__.co_filename
