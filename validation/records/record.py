"""A record: expected or observed results of some steps, by the model's own parameter names.

Apart from each parameter's place, a record is independent of ranks: records with different schedules, P or V compare.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeproof.core.comparison import Allowed, Comparison, ExpectedOperation, expect_operation
from pipeproof.core.floors import Floors
from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import Precision, precision_among, precision_of
from pipeproof.core.nudged import Nudged
from pipeproof.core.observe.elements import bits
from pipeproof.core.observe.recording import Gradients
from pipeproof.core.observe.shards import Shard
from pipeproof.core.tolerance import Floor, default_floor, error, same_bits
from pipeproof.pipeline.mesh import AXES
from pipeproof.reference.step import Expected

_PIECE = 1 << 20  # bytes that are copied at once


class ContentError(ValueError):
    """A value without a digest."""


def digest(value: object) -> str:
    """SHA-256 over tensors, numbers, text and None, and nested tuples, lists and dicts; in hexadecimal."""
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
    """Two records of different steps; ``reason``: the difference."""

    def __init__(self, reason: str, differ: str) -> None:
        super().__init__(f"the records have {reason}{differ}; expected two records of the same steps")
        self.reason = reason


@dataclass(frozen=True)
class RecordedFloors:
    """Rounding floors of each number in an operation, measured by the reference.

    ``moved``: the effect of weights one rounding off; None if not measured. ``updates``: floors after an optimizer;
    none if no larger than a gradient's.
    """

    losses: Sequence[Floor]
    norm: Floor
    gradients: Mapping[str, Floor]
    moved: Nudged | None = None
    updates: Mapping[str, Floor] = field(default_factory=dict)

    @classmethod
    def measure(
        cls, expected: Expected, floors: Floors, *, moved: bool = False, updates: bool = False
    ) -> "RecordedFloors":
        """Measure all ``floors`` of an operation with results ``expected``.

        ``moved``: by other weights as well. ``updates``: of parameters after the optimizer, too.
        """
        return cls(
            tuple(floors.loss(microbatch) for microbatch in range(len(expected.losses))),
            floors.norm(),
            {name: floors.gradient((stage, name)) for stage, name in expected.gradients},
            floors.moved if moved else None,
            {name: floors.update((stage, name), pushed=True) for stage, name in expected.parameters if updates},
        )


@dataclass(frozen=True)
class RecordedOperation(ExpectedOperation):
    """An operation in a plan: "train", "accumulate" or "eval". ``floors``: None if not measured.

    ``contents``: digests of each microbatch's tensors, in any form; empty if not taken.
    """

    floors: RecordedFloors | None = None
    contents: tuple[str, ...] = ()

    @classmethod
    def of(cls, expected: Expected, microbatches: tuple[str, ...], **more: Any) -> Self:
        """Record the reference's results for these ``microbatches``, by digest; ``more``: further fields."""
        return cls(**vars(replace(expect_operation(expected), microbatches=microbatches)), **more)


@dataclass(frozen=True)
class Record:
    """Expected or observed results, and their ``config`` in plain data, with the same words in every record.

    ``places``: each parameter's ranks and stages, by its name in the model: one place, unless wrong; empty without a
    pipeline.
    """

    kind: Kind
    config: Mapping[str, object]
    operations: tuple[RecordedOperation, ...]
    places: Mapping[str, Sequence[RankStage]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The record's name, on one line."""
        return str(self.config.get("case") or self.config.get("model") or "a step")

    @property
    def products(self) -> Mapping[str, str]:
        """Rounding of fp32 products by kind, if recorded."""
        found = self.config.get("products")
        return {str(sort): str(name) for sort, name in found.items()} if isinstance(found, Mapping) else {}

    @property
    def framework(self) -> str:
        """The framework's name; empty without one."""
        return str(self.config.get("framework") or "")

    @property
    def max_norm(self) -> float | None:
        """Clipping norm, if known."""
        found = self.config.get("max_norm")
        return float(found) if isinstance(found, int | float) else None

    def nudged(self, number: int) -> Nudged | None:
        """How far weights one rounding off move operation ``number``; None if not measured."""
        floors = self.operations[number].floors
        return None if floors is None else floors.moved

    def before(self, number: int) -> Gradients:
        """Gradients of the last step before operation ``number``; empty without one."""
        steps = [one for one in self.operations[:number] if one.operation == "train"]
        return steps[-1].gradients if steps else {}


def config_differences(one: Record, other: Record) -> Iterator[tuple[str, object, object]]:
    """Yield config fields that differ: name, and both values (None if absent).

    All but a case's line, which repeats the others. Older axes had a case's names.
    """
    both: list[dict[str, object]] = [{}, {}]
    for each, fields in zip((one, other), both, strict=True):
        for name, value in each.config.items():
            if isinstance(value, list):  # spelled as in a case's line: 1,1 for numbers, train+eval for words
                value = ("+" if any(isinstance(item, str) for item in value) else ",").join(map(str, value))
            fields[AXES.get(name, name)] = value
    for name in dict.fromkeys([*both[0], *both[1]]):
        values = both[0].get(name), both[1].get(name)
        if name != "case" and values[0] != values[1]:
            yield name, *values


def other_weights(
    expected: Mapping[str, Tensor], observed: Mapping[str, Tensor], shards: Mapping[str, Shard] | None = None
) -> str:
    """Describe the first parameter with different initial weights, in the model's order; empty without one.

    ``shards``: places of observed parts in the whole.
    """
    for name in (name for name in expected if name in observed):  # a record fetches on demand
        one, wanted = observed[name].detach().cpu(), expected[name].cpu()
        wanted = shards[name].of(wanted) if shards and name in shards else wanted
        if not same_bits(one, wanted):
            return f"{name} first, by a relative error of {error(one, wanted):.1e}"
    return ""


def other_microbatch(expected: Sequence[str], observed: Sequence[str]) -> str:
    """Describe the first difference between microbatches, by digest; empty without one."""
    if len(expected) != len(observed):
        return f"{len(observed)} microbatches, not {len(expected)}"
    for number, (wanted, one) in enumerate(zip(expected, observed, strict=True)):
        if one != wanted:
            elsewhere = f": it has the content of microbatch {expected.index(one)}" if one in expected else ""
            return f"microbatch {number} first{elsewhere}"
    return ""


def microbatch_digests(microbatches: Sequence[tuple[object, object]]) -> tuple[str, ...]:
    """Digest each microbatch, a pair of inputs and target: tensors, or tuples, lists and dicts of tensors."""
    return tuple(digest((_plain(inputs), target)) for inputs, target in microbatches)


def content_digests(microbatches: Iterable[object]) -> tuple[str, ...]:
    """Digest all tensors in each microbatch, in any form: each once, unordered."""
    leaves = ([leaf for leaf in tree_leaves(one) if isinstance(leaf, Tensor)] for one in microbatches)
    return tuple(digest(sorted({digest(leaf) for leaf in found})) for found in leaves)


def numbers_in(expected: Sequence[str], observed: Sequence[str]) -> list[int] | None:
    """Number each microbatch as in ``expected``, by digest; None unless both sets match."""
    if sorted(expected) != sorted(observed):
        return None
    numbers: dict[str, list[int]] = {}
    for number, one in reversed(list(enumerate(expected))):
        numbers.setdefault(one, []).append(number)
    return [numbers[one].pop() for one in observed]


def _plain(inputs: object) -> object:
    """Unwrap a tuple with a single tensor: the same inputs."""
    return inputs[0] if isinstance(inputs, tuple | list) and len(inputs) == 1 else inputs


LAWS = (
    "parameters-once",  # every parameter of the one is in exactly one place of the other
    "loss",  # each microbatch's, and the whole operation's
    "presence",  # a gradient is None exactly where the other is
    "gradient",  # every parameter's
    "grad-norm",  # over logical parameters
    "updated-parameters",  # after clip and optimizer step
    "buffers",  # state left by forwards, such as running statistics
)
_LOST = 1 / 64  # of an update: as much as a fault changes, unless the smallest was measured


def against(expected: RecordedOperation, ledger: Ledger, *, number: int = 0) -> Comparison:
    """Compare with ``expected``, operation ``number`` of a record."""
    return Comparison(expected, Recorded(expected), ledger, number=number)


@dataclass(frozen=True)
class Recorded(Allowed):
    """Recorded rounding floors of an operation.

    Without measured floors a little is rounding, much is wrong, and anything between is unknown.
    """

    expected: RecordedOperation

    @cached_property
    def precision(self) -> Precision:
        """The operation's precision."""
        floors, one = self.expected.floors, self.expected
        if floors is not None:
            return floors.norm.precision
        found = (source[name] for source in (one.gradients, one.before) for name in source)
        return precision_among(tensor for tensor in found if tensor is not None)

    def loss(self, microbatch: int) -> Floor:
        floors = self.expected.floors
        return self.total() if floors is None else floors.losses[microbatch]

    def total(self) -> Floor:  # never measured
        return default_floor(self.precision)

    def norm(self) -> Floor:
        return self.total() if self.expected.floors is None else self.expected.floors.norm

    def gradient(self, name: str) -> Floor:
        if self.expected.floors is not None:
            return self.expected.floors.gradients[name]
        gradient = self.expected.gradients.get(name)
        return self.total() if gradient is None else default_floor(precision_of(gradient.dtype))

    def update(self, name: str) -> Floor:
        floors, floor = self.expected.floors, replace(self.gradient(name), sums=None)
        return replace(floor, fault=2 * _LOST) if floors is None else floors.updates.get(name, floor)


def upstream(names: Iterable[str], stages: dict[str, int]) -> list[str]:
    """Sort names from the last stage to the first; without stages, from the model's last parameter.

    As gradients flow: the first to differ is nearest to the fault.
    """
    return sorted([*names][::-1], key=lambda name: -stages.get(name, 0))
