"""Random numbers that nobody else notices."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from pipeproof.worlds.accelerator import drawing


@contextmanager
def drawing_apart(seed: int | None = None) -> Iterator[None]:
    """While this is open, what is drawn or seeded changes nothing for what is drawn later; it follows from ``seed``."""
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
