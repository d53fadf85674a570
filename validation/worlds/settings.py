"""Process-wide settings and random states: restored, so that jobs cannot affect later ones."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch

from pipeproof.worlds.accelerator import CPU, drawing

Setting = tuple[Callable[[], Any], Callable[[Any], object]]  # getter and setter

# torch's settings for fp32 product rounding on a CPU, since 2.9. The first is the default for the others.
_ROUNDED: tuple[Setting, ...] = tuple(
    (partial(torch._C._get_fp32_precision_getter, *one), partial(torch._C._set_fp32_precision_setter, *one))
    for one in [("generic", "all"), *(("mkldnn", sort) for sort in ("all", "matmul", "conv", "rnn"))]
)


def _products() -> tuple[str | None, *tuple[str, ...]]:
    """Return the older product setting, None if newer ones override it, and the newer ones."""
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = None
    return older, *(ask() for ask, _ in _ROUNDED)


def _set_products(wanted: tuple[str | None, *tuple[str, ...]]) -> None:
    older, *newer = wanted
    if older is not None:
        torch.set_float32_matmul_precision(older)
    for (ask, put), name in zip(_ROUNDED, newer, strict=True):
        if ask() != name:
            put(name)


OF_A_PROCESS: tuple[Setting, ...] = (
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda both: torch.set_anomaly_enabled(*both),
    ),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_products, _set_products),
    (torch.get_num_threads, torch.set_num_threads),
)
_OF_A_THREAD: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_device, lambda device: torch.set_default_device(None if device.type == CPU else device)),
)


class Settings:
    """A snapshot of current settings."""

    def __init__(self) -> None:
        self._values = [(setting, setting[0]()) for setting in (*OF_A_PROCESS, *_OF_A_THREAD)]

    def put_back(self) -> None:
        """Restore changed settings."""
        for (ask, put), value in self._values:
            if ask() != value:
                put(value)


@contextmanager
def drawing_apart(seed: int | None = None) -> Iterator[None]:
    """Isolate random draws inside the context: later draws stay unaffected. ``seed`` determines them."""
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(drawing()):
        if seed is not None:
            for begin in (random.seed, numpy.random.seed, torch.manual_seed):
                begin(seed)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


def draw_some() -> None:
    """Draw a number from each source."""
    random.random()
    numpy.random.random_sample()
    torch.rand(())
