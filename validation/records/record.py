"""A record: what was expected of some steps, or what a run gave in them, by the model's own names of its parameters.

A record knows nothing of ranks but where each parameter lay, so records of different schedules, P or V can be compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from reference.step import Expected
from validation.judging.comparison import Due
from validation.judging.oracle import Floors
from validation.judging.tolerance import Floor
from validation.records.content import digest

Kind = Literal["expected", "observed"]
Gradients = Mapping[str, Tensor | None]
Place = tuple[int, int]  # rank and stage


class RecordError(ValueError):
    """A record that cannot be made, written, read or compared."""


@dataclass(frozen=True)
class RecordedFloors:
    """What rounding alone does to each number of an operation, as the reference measured it."""

    losses: Sequence[Floor]
    norm: Floor
    gradients: Mapping[str, Floor]

    @classmethod
    def measured(cls, expected: Expected, floors: Floors) -> "RecordedFloors":
        """All the ``floors`` of an operation that must give ``expected``."""
        return cls(
            tuple(floors.loss(microbatch) for microbatch in range(len(expected.losses))),
            floors.norm(),
            {name: floors.gradient((stage, name)) for stage, name in expected.gradients},
        )


@dataclass(frozen=True)
class RecordedOperation(Due):
    """One operation of a plan: "train", "accumulate" or "eval". ``floors`` is None where nobody measured them."""

    floors: RecordedFloors | None = None


@dataclass(frozen=True)
class Record:
    """What was expected or seen, and of what: ``config`` says it in plain data, the same words in every record.

    ``places`` says of each parameter, by its name in the model, which rank and stage held it: one place, unless
    something is wrong; none are known where no pipeline ran.
    """

    kind: Kind
    config: Mapping[str, object]
    operations: tuple[RecordedOperation, ...]
    places: Mapping[str, Sequence[Place]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is a record of, on one line."""
        return str(self.config.get("case") or self.config.get("model") or "a step")

    @property
    def max_norm(self) -> float | None:
        """What gradients are clipped to, where that is known."""
        found = self.config.get("max_norm")
        return float(found) if isinstance(found, int | float) else None

    def before(self, number: int) -> Gradients:
        """The gradients of the last step before operation ``number``; empty where there is none."""
        steps = [one for one in self.operations[:number] if one.operation == "train"]
        return steps[-1].gradients if steps else {}


def config_differences(one: Record, other: Record) -> Iterator[tuple[str, object, object]]:
    """What the configs say differently: the name, and what each says (None where it says nothing).

    All but the line of a case, which repeats the others.
    """
    for name in dict.fromkeys([*one.config, *other.config]):
        if name == "case":
            continue
        values = one.config.get(name), other.config.get(name)
        if values[0] != values[1]:
            yield name, *values


def microbatch_digests(microbatches: Sequence[tuple[object, object]]) -> tuple[str, ...]:
    """A digest of each microbatch, a pair of inputs and target: tensors, or tuples, lists and dicts of them."""
    return tuple(digest((_plain(inputs), target)) for inputs, target in microbatches)


def _plain(inputs: object) -> object:
    """One tensor and a tuple of it alone are the same inputs."""
    return inputs[0] if isinstance(inputs, tuple | list) and len(inputs) == 1 else inputs
