"""What must hold of the actions of a step whose stages are held against themselves."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from pipeproof.reference.step import Site


@dataclass(frozen=True)
class ChainConditions:
    """What must hold of actions: of every stage once for each microbatch, but backwards of the ``frozen`` ones."""

    counts: tuple[int, ...]
    frozen: Collection[int]
    plan: tuple[str, ...] = ("train",)
    due: frozenset[Site] = frozenset()
    unmatched: Mapping[Site, str] = field(default_factory=dict)
    unseen: Collection[int] = ()
    uncalled: Collection[int] = ()
    traced: Collection[int] = ()
    mode_matters: Callable[[], bool] = lambda: True
