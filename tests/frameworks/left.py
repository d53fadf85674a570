"""What a check of a running job has to leave as it was, and what is another."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.observe.shards import InShards


def seed() -> None:
    """Begin with the same random numbers."""
    torch.manual_seed(7)
    random.seed(7)


def left(modules: Sequence[nn.Module], optimizer: Any, *owners: Any) -> dict[str, Any]:
    """The state of a job."""
    every = [one for module in modules for one in module.modules()]
    return {
        "attributes": [sorted(vars(one)) for one in (optimizer, *owners, *every)],
        "hooks": [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in every],
        "drawn": (torch.rand(2).tolist(), random.random()),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "weights": [*tensors([one for module in modules for one in module.parameters()])],
        "optimizer": [*tensors(optimizer.state_dict())],
    }


def tensors(found: Any) -> Iterator[Tensor]:
    """All that are in a state; of a DTensor what this rank has, as other ranks are not asked."""
    if isinstance(found, Tensor):
        own = found.detach()
        yield (own.to_local() if isinstance(own, InShards) else own).clone()
    elif isinstance(found, dict | list | tuple):
        for one in found.values() if isinstance(found, dict) else found:
            yield from tensors(one)


def differences(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> list[str]:
    """What is another, of states one after the other; of groups only how many came."""
    born = [state["groups"] - states[0]["groups"] for states in (one, other) for state in states]
    wrong = ["groups"] if any(born) else []
    for step, beside in zip(one, other, strict=True):
        wrong += [name for name in step if name != "groups" and not alike(step[name], beside[name])]
    return wrong


def alike(one: Any, other: Any) -> bool:
    """Whether both are the same, to the bit."""
    if isinstance(one, Tensor):
        return one.equal(other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)
