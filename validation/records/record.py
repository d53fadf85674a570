"""A record: what was expected of some steps, or what a run gave in them, by the model's own names of its parameters.

A record knows nothing of ranks but where each parameter lay, so records of different schedules, P or V can be compared.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeproof.core.comparison import Comparison, Due
from pipeproof.core.floors import Floors
from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import Precision, precision_among, precision_of
from pipeproof.core.nudged import Nudged
from pipeproof.core.observe.elements import bits
from pipeproof.core.observe.recording import Gradients
from pipeproof.core.observe.shards import Shard
from pipeproof.core.tolerance import Floor, error, same_bits
from pipeproof.pipeline.mesh import AXES
from pipeproof.reference.step import Expected

_PIECE = 1 << 20  # bytes that are copied at once


class ContentError(ValueError):
    """Something that has no digest."""


def digest(value: object) -> str:
    """SHA-256 of tensors, numbers, text and None, and of tuples, lists and dicts of these; as hexadecimal digits."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: "hashlib._Hash", value: object) -> None:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise ContentError("a sparse tensor has no digest: make it dense, with to_dense()")
        if value.is_quantized:
            raise ContentError("a quantised tensor has no digest: it has a scale beside its elements; dequantize() it")
        found.update(f"{value.dtype} {list(value.shape)}\n".encode())
        for part in torch.split(bits(value).view(torch.uint8), _PIECE):
            own = part.to("cpu", copy=True)  # numpy makes of a storage one that its job cannot resize
            found.update(own.numpy().data)
    elif isinstance(value, tuple | list):
        found.update(f"({len(value)}\n".encode())
        for part in value:
            _feed(found, part)
    elif isinstance(value, Mapping):
        found.update(f"{{{len(value)}\n".encode())
        for name in sorted(value, key=str):
            _feed(found, (str(name), value[name]))
    elif value is None or isinstance(value, str | int | float):
        found.update(f"{value!r}\n".encode())
    else:
        raise ContentError(f"a {type(value).__name__} has no digest: expected tensors, numbers or text")


Kind = Literal["expected", "observed"]
RankStage = tuple[int, int]  # rank and stage


class RecordError(ValueError):
    """A record that cannot be made, written, read or compared."""


class OtherSteps(RecordError):
    """Two records that are not of the same steps; ``reason`` says what is another."""

    def __init__(self, reason: str, differ: str) -> None:
        super().__init__(f"the records have {reason}{differ}; expected two records of the same steps")
        self.reason = reason


@dataclass(frozen=True)
class RecordedFloors:
    """What rounding alone does to each number of an operation, as the reference measured it.

    ``moved``: how far weights that are one rounding off move it; None where that was not measured. ``updates``: what an
    optimizer makes of rounding; none where it makes no more of it than a gradient has.
    """

    losses: Sequence[Floor]
    norm: Floor
    gradients: Mapping[str, Floor]
    moved: Nudged | None = None
    updates: Mapping[str, Floor] = field(default_factory=dict)

    @classmethod
    def measured(
        cls, expected: Expected, floors: Floors, *, moved: bool = False, updates: bool = False
    ) -> "RecordedFloors":
        """All the ``floors`` of an operation that must give ``expected``; ``moved``: by other weights as well.

        ``updates``: those of what an optimizer makes, too.
        """
        return cls(
            tuple(floors.loss(microbatch) for microbatch in range(len(expected.losses))),
            floors.norm(),
            {name: floors.gradient((stage, name)) for stage, name in expected.gradients},
            floors.moved if moved else None,
            {name: floors.update((stage, name)) for stage, name in expected.parameters if updates},
        )


@dataclass(frozen=True)
class RecordedOperation(Due):
    """One operation of a plan: "train", "accumulate" or "eval". ``floors`` is None where nobody measured them.

    ``contents`` are digests of what is in each microbatch, in whatever form; where nobody took them, there are none.
    """

    floors: RecordedFloors | None = None
    contents: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """What was expected or seen, and of what: ``config`` says it in plain data, the same words in every record.

    ``places`` says of each parameter, by its name in the model, which rank and stage held it: one place, unless
    something is wrong; none are known where no pipeline ran.
    """

    kind: Kind
    config: Mapping[str, object]
    operations: tuple[RecordedOperation, ...]
    places: Mapping[str, Sequence[RankStage]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is a record of, on one line."""
        return str(self.config.get("case") or self.config.get("model") or "a step")

    @property
    def products(self) -> Mapping[str, str]:
        """As what products of fp32 were rounded, by their sort, where the record says so."""
        found = self.config.get("products")
        return {str(sort): str(name) for sort, name in found.items()} if isinstance(found, Mapping) else {}

    @property
    def framework(self) -> str:
        """The framework that ran it; empty where that was none."""
        return str(self.config.get("framework") or "")

    @property
    def max_norm(self) -> float | None:
        """What gradients are clipped to, where that is known."""
        found = self.config.get("max_norm")
        return float(found) if isinstance(found, int | float) else None

    def moved(self, number: int) -> Nudged | None:
        """How far weights that are one rounding off move operation ``number``; None where nobody measured it."""
        floors = self.operations[number].floors
        return None if floors is None else floors.moved

    def before(self, number: int) -> Gradients:
        """The gradients of the last step before operation ``number``; empty where there is none."""
        steps = [one for one in self.operations[:number] if one.operation == "train"]
        return steps[-1].gradients if steps else {}


def config_differences(one: Record, other: Record) -> Iterator[tuple[str, object, object]]:
    """What the configs say differently: the name, and what each says (None where it says nothing).

    All but the line of a case, which repeats the others.
    """
    both = _words(one), _words(other)
    for name in (name for name in dict.fromkeys([*both[0], *both[1]]) if name != "case"):
        values = _said(both[0].get(name)), _said(both[1].get(name))
        if values[0] != values[1]:
            yield name, *values


def _words(record: Record) -> dict[str, object]:
    """A config by the names that configs have now: axes were called as a case calls them."""
    return {AXES.get(name, name): value for name, value in record.config.items()}


def _said(value: object) -> object:
    """A list as a case's line has it: ``1,1`` of numbers, ``train+eval`` of words."""
    if not isinstance(value, list):
        return value
    return ("+" if any(isinstance(one, str) for one in value) else ",").join(map(str, value))


def other_weights(
    expected: Mapping[str, Tensor], seen: Mapping[str, Tensor], shards: Mapping[str, Shard] | None = None
) -> str:
    """The first parameter, in the model's order, that is another before the step, and how far; empty if none is.

    ``shards``: where what is seen lies, of those that are parts.
    """
    for name in (name for name in expected if name in seen):  # a record fetches what it is asked for
        one, wanted = seen[name].detach().cpu(), expected[name].cpu()
        wanted = shards[name].of(wanted) if shards and name in shards else wanted
        if not same_bits(one, wanted):
            return f"{name} first, by a relative error of {error(one, wanted):.1e}"
    return ""


def other_microbatch(expected: Sequence[str], seen: Sequence[str]) -> str:
    """What is another in the microbatches, by their digests; empty if nothing is."""
    if len(expected) != len(seen):
        return f"{len(seen)} microbatches, not {len(expected)}"
    for number, (wanted, one) in enumerate(zip(expected, seen, strict=True)):
        if one != wanted:
            elsewhere = f": it has the content of microbatch {expected.index(one)}" if one in expected else ""
            return f"microbatch {number} first{elsewhere}"
    return ""


def microbatch_digests(microbatches: Sequence[tuple[object, object]]) -> tuple[str, ...]:
    """A digest of each microbatch, a pair of inputs and target: tensors, or tuples, lists and dicts of them."""
    return tuple(digest((_plain(inputs), target)) for inputs, target in microbatches)


def content_digests(microbatches: Iterable[object]) -> tuple[str, ...]:
    """A digest of all tensors of each microbatch, in whatever form a framework wants them: each once, in no order."""
    leaves = ([leaf for leaf in tree_leaves(one) if isinstance(leaf, Tensor)] for one in microbatches)
    return tuple(digest(sorted({digest(leaf) for leaf in found})) for found in leaves)


def numbers_in(expected: Sequence[str], seen: Sequence[str]) -> list[int] | None:
    """The number that each microbatch has in ``expected``, by their digests; None where these are not the same ones."""
    if sorted(expected) != sorted(seen):
        return None
    numbers: dict[str, list[int]] = {}
    for number, one in reversed(list(enumerate(expected))):
        numbers.setdefault(one, []).append(number)
    return [numbers[one].pop() for one in seen]


def _plain(inputs: object) -> object:
    """One tensor and a tuple of it alone are the same inputs."""
    return inputs[0] if isinstance(inputs, tuple | list) and len(inputs) == 1 else inputs


LAWS = (
    "parameters-once",  # every parameter of the one is in exactly one place of the other
    "loss",  # each microbatch's, and the whole operation's
    "presence",  # a gradient is None exactly where the other is
    "gradient",  # every parameter's
    "grad-norm",  # over logical parameters
    "updated-parameters",  # after clip and optimizer step
    "buffers",  # what forwards leave behind, such as running statistics
)
_LOST = 1 / 64  # of an update: as much as a fault changes, where nobody measured the smallest


def against(expected: RecordedOperation, ledger: Ledger, *, number: int = 0) -> Comparison:
    """A comparison with ``expected``, the operation ``number`` of a record."""
    return Comparison(expected, Recorded(expected), ledger, number=number)


@dataclass(frozen=True)
class Recorded:
    """What rounding may do to an operation, as recorded.

    Where nobody measured it, little is rounding, much is wrong, and what is between is unknown.
    """

    expected: RecordedOperation

    @cached_property
    def precision(self) -> Precision:
        """How the operation's numbers are rounded."""
        floors, one = self.expected.floors, self.expected
        if floors is not None:
            return floors.norm.precision
        found = (source[name] for source in (one.gradients, one.before) for name in source)
        return precision_among(tensor for tensor in found if tensor is not None)

    def loss(self, microbatch: int) -> Floor:
        """Of a microbatch's loss."""
        floors = self.expected.floors
        return self.total() if floors is None else floors.losses[microbatch]

    def total(self) -> Floor:
        """Of the whole operation's loss, which nobody measures."""
        return Floor(0.0, 0.0, 4 * self.precision.most, self.precision)

    def norm(self) -> Floor:
        """Of the gradient norm."""
        return self.total() if self.expected.floors is None else self.expected.floors.norm

    def gradient(self, name: str) -> Floor:
        """Of a gradient."""
        if self.expected.floors is not None:
            return self.expected.floors.gradients[name]
        gradient = self.expected.gradients.get(name)
        precision = self.precision if gradient is None else precision_of(gradient.dtype)
        return Floor(0.0, 0.0, 4 * precision.most, precision)

    def update(self, name: str) -> Floor:
        """Of a parameter's movement."""
        floors, floor = self.expected.floors, replace(self.gradient(name), sums=None)
        return replace(floor, fault=2 * _LOST) if floors is None else floors.updates.get(name, floor)


def upstream(names: Iterable[str], stages: dict[str, int]) -> list[str]:
    """From the last stage to the first; from the last of the model's parameters, where stages are not known.

    As gradients flow: the first to differ is nearest to the fault.
    """
    return sorted([*names][::-1], key=lambda name: -stages.get(name, 0))
