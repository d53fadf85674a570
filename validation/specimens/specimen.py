"""What a specimen is: a fault planted on purpose, by composition."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.step import Parts
from reference.data import Batch

Plant = Callable[[Parts], Parts]
Feed = Callable[[Sequence[Batch], Parts], Sequence[Batch]]


def unchanged_parts(parts: Parts) -> Parts:
    """Plants nothing."""
    return parts


def unchanged_data(batches: Sequence[Batch], parts: Parts) -> Sequence[Batch]:
    """Feeds what the case says."""
    return batches


@dataclass(frozen=True)
class Specimen:
    """A fault, where it comes from, the smallest case that shows it, and the law that must fail.

    ``plant`` changes the parts of a rank's step; ``feed`` the microbatches that this rank is given. ``models`` are
    those that can show it; empty for all.
    """

    name: str
    summary: str
    origin: str
    smallest: str
    law: str
    plant: Plant = unchanged_parts
    feed: Feed = unchanged_data
    models: tuple[str, ...] = ()
