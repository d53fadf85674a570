"""Process groups that a framework makes and leaves: a campaign would have thousands."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

_CACHE = type(lru_cache(lambda: None))


@contextmanager
def groups_given_back() -> Iterator[None]:
    """Give back, when the block ends well, all groups that were made in it. Every rank enters it."""
    before = set(_groups())
    yield
    dist.barrier()  # nobody is inside a group any more
    if made := set(_groups()) - before:
        for group in made:
            dist.destroy_process_group(group)
        forget_meshes()


def forget_meshes() -> None:
    """Let DTensors forget what they know of meshes.

    Of an operation on one they remember the mesh of its result. A mesh made later of the same ranks is equal to it, so
    that results of today would be on the first one's, whose groups are gone: "Could not resolve the process group".
    """
    for one in _caches(len(sys.modules)):
        one.cache_clear()
    native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if native is not None:  # not in every torch
        native()


@lru_cache(maxsize=1)
def _caches(modules: int) -> list[Any]:
    """Those of DTensor's code. They are made as modules are imported, and a walk takes long: one for every number."""
    every = (one for one in gc.get_objects() if type(one) is _CACHE)
    return [one for one in every if str(getattr(one, "__module__", "")).startswith("torch.distributed.tensor")]


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)
