"""Two frameworks give one parameter two names: rename a record's parameters by equal weights.

They number microbatches differently, too: renumber a record's microbatches by equal contents.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from pipeproof.pipeline.sizes import some
from pipeproof.records.record import OtherSteps, Record, RecordedFloors, RecordedOperation, digest, numbers_in
from pipeproof.records.record_file import Addressed

Value = TypeVar("Value")


def as_named_in(expected: Record, observed: Record) -> tuple[Record, str]:
    """Rename ``observed`` to the names of ``expected``, and add a sentence if weights decided.

    Only frameworks' records need this; others share one model's names. Raises ``OtherSteps`` if weights do not identify
    parameters.
    """
    wanted, held = expected.operations[0].before, observed.operations[0].before
    if not (expected.framework or observed.framework) or not wanted or not held or wanted.keys() == held.keys():
        return observed, ""
    known, theirs = _contents(wanted), _contents(held)
    new = [name for name, content in theirs.items() if content not in known.values()]
    if new:
        said = f"weights that differ before the first step: no parameter of the first has those of {new[0]}"
        raise OtherSteps(said, "")
    if left := [name for name, content in known.items() if content not in theirs.values()]:
        raise OtherSteps(f"other parameters: the second has none that is {left[0]}", "")
    own = {name: name for name, content in theirs.items() if known.get(name) == content}
    holders = {content: name for name, content in known.items() if name not in own}
    names = own | {name: holders[content] for name, content in theirs.items() if name not in own and content in holders}
    many = Counter(known.values()) + Counter(theirs.values())
    alike = [name for name, content in theirs.items() if name not in own and many[content] != 2]
    if alike or len(known) != len(theirs):
        unknown = alike[0] if alike else next(name for name in theirs if name not in names)
        cure = "; record a later step, where no two weights are alike"
        raise OtherSteps(f"parameters of other names: weights do not tell which one {unknown} of the second is", cure)
    return _rename(
        observed, names
    ), f"{some(len(names) - len(own), 'parameter')} of other names, matched by their weights"


def as_numbered_in(expected: Record, observed: Record) -> Record:
    """Renumber microbatches of ``observed`` as in ``expected``, for a framework's record with equal contents.

    Replicas have their own order.
    """
    if not (expected.framework or observed.framework) or len(expected.operations) != len(observed.operations):
        return observed
    both = zip(expected.operations, observed.operations, strict=True)
    return replace(observed, operations=tuple(_renumber(wanted, one) for wanted, one in both))


def contents_of(operation: RecordedOperation) -> tuple[str, ...]:
    """Content digests by microbatch; older framework records lack them."""
    return operation.contents or operation.microbatches


def _renumber(wanted: RecordedOperation, one: RecordedOperation) -> RecordedOperation:
    numbers = numbers_in(contents_of(wanted), contents_of(one))
    if numbers is None or numbers == sorted(numbers):
        return one

    def by(found: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(found[numbers.index(number)] for number in range(len(found)))

    floors = None if one.floors is None else replace(one.floors, losses=by(one.floors.losses))
    return replace(
        one, microbatches=by(one.microbatches), contents=by(one.contents), losses=by(one.losses), floors=floors
    )


def _contents(weights: Mapping[str, Tensor]) -> dict[str, bytes | None]:
    if isinstance(weights, Addressed):
        return {name: None if one is None else one.encode() for name, one in weights.digests.items()}
    return {name: digest(weights[name]).encode() for name in weights}


def _rename(record: Record, names: Mapping[str, str]) -> Record:
    def by(found: Mapping[str, Value]) -> dict[str, Value]:
        return {names.get(name, name): found[name] for name in found}

    def floors_of(one: RecordedFloors) -> RecordedFloors:
        moved = one.moved
        if moved is not None:
            moved = replace(moved, gradients=by(moved.gradients), leads=by(moved.leads), updates=by(moved.updates))
        return replace(one, gradients=by(one.gradients), updates=by(one.updates), moved=moved)

    def operation(one: RecordedOperation) -> RecordedOperation:
        return replace(
            one,
            before=by(one.before),
            gradients=by(one.gradients),
            parameters=by(one.parameters),
            floors=None if one.floors is None else floors_of(one.floors),
        )

    return replace(record, operations=tuple(map(operation, record.operations)), places=by(record.places))
