"""The same bits on every run, where a device or a shared generator would not give them by itself."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


def deterministic(device: str) -> None:
    """Make a GPU give the same bits twice; a CPU with one thread does so anyway."""
    if device.startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@contextmanager
def drawing_apart() -> Iterator[None]:
    """While this is open, what is drawn or seeded changes nothing for what is drawn later."""
    python, arrays = random.getstate(), numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]  # torch's
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)
