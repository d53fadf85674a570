"""How a step of a framework is laid out, and what its engine is told: facts alone, without importing the framework."""

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar

_SHAPE = ("pp", "vp", "dp", "layers", "seed")


@dataclass(frozen=True)
class FrameworkLayout:
    """pp: ranks of a pipeline. vp: stages on each. dp: replicas. layers: of the model, between its two ends.

    What a subclass has besides is what the engine is told: a flag, a number, or one of some words. ``offered`` are the
    values that are drawn for each of these, the plainest first; the first decides which sizes there may be.
    """

    pp: int = 2
    vp: int = 1
    dp: int = 1
    layers: int = 4
    seed: int = 0

    framework: ClassVar[str]
    offered: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})
    least_ranks: ClassVar[int] = 1
    most_virtual: ClassVar[int] = 1

    @classmethod
    def told(cls) -> dict[str, Field[Any]]:
        """What the engine is told, by the words of a line."""
        return {word(one.name): one for one in fields(cls) if one.name not in _SHAPE}

    @property
    def order(self) -> str:
        """What its schedule is called."""
        return "1f1b"

    @property
    def dtype(self) -> str:
        """Of weights, activations and gradients."""
        return "fp32"

    def refusals(self, microbatches: int) -> Iterator[tuple[bool, str]]:
        """What this framework, or its adapter, cannot have: whether it is so here, and a sentence."""
        yield from ()

    def why_not(self, microbatches: int) -> str:
        """Why the framework cannot have this with so many microbatches a replica; empty if it can."""
        return next((reason for holds, reason in self.refusals(microbatches) if holds), "")


def offers(order: str, **values: tuple[Any, ...]) -> Mapping[str, tuple[Any, ...]]:
    """The ``values`` that are drawn for each option, in this order; of one that has none, whether it is so."""
    return MappingProxyType({name: values.get(name, (False, True)) for name in order.split()})


def word(name: str) -> str:
    """A field's name, as a line has it."""
    return name.replace("_", "-")
