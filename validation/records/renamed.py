"""Two frameworks call one parameter by two names: a record, with the names that another has of the same weights."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from pipeproof.foreign.matching import Local, match
from pipeproof.pipeline.sizes import some
from pipeproof.records.record import OtherSteps, Record, RecordedOperation, digest
from pipeproof.records.record_file import Addressed

Value = TypeVar("Value")


def as_named_in(expected: Record, seen: Record) -> tuple[Record, str]:
    """``seen`` by the names that ``expected`` has, and a sentence where that was told by weights.

    Names are looked for where a framework ran one of the steps; other records have those of one model. Raises
    ``OtherSteps`` where weights do not tell which parameter is which.
    """
    wanted, held = expected.operations[0].before, seen.operations[0].before
    if not (expected.framework or seen.framework) or not wanted or not held or wanted.keys() == held.keys():
        return seen, ""
    known = _contents(wanted)
    new = [name for name, content in _contents(held).items() if content not in known.values()]
    if new:
        said = f"weights that differ before the first step: no parameter of the first has those of {new[0]}"
        raise OtherSteps(said, "")
    part = [Local(name, content=content) for name, content in _contents(held).items()]
    found = match([part], known).names
    names = {part[k].name: name for (_, k), name in found.items()}
    strangers = [one.name for one in part if one.name not in names]
    taken = set(names.values())
    if strangers or len(taken) < len(names) or len(names) < len(known):
        left = [name for name in known if name not in taken]
        raise OtherSteps(_stranger(strangers, left), "; record a later step, where no two weights are alike")
    return _renamed(seen, names), f"{some(len(names), 'parameter')} of other names, matched by their weights"


def _contents(weights: Mapping[str, Tensor]) -> dict[str, bytes | None]:
    if isinstance(weights, Addressed):
        return {name: None if one is None else one.encode() for name, one in weights.digests.items()}
    return {name: digest(weights[name]).encode() for name in weights}


def _stranger(strangers: list[str], left: list[str]) -> str:
    if strangers:
        return f"parameters of other names: weights do not tell which one {strangers[0]} of the second is"
    return f"other parameters: the second has none that is {left[0]}" if left else "copies of one parameter"


def _renamed(record: Record, names: Mapping[str, str]) -> Record:
    def by(found: Mapping[str, Value]) -> dict[str, Value]:
        return {names.get(name, name): found[name] for name in found}

    def operation(one: RecordedOperation) -> RecordedOperation:
        floors = None if one.floors is None else replace(one.floors, gradients=by(one.floors.gradients))
        return replace(
            one,
            before=by(one.before),
            gradients=by(one.gradients),
            parameters=by(one.parameters),
            floors=floors,
        )

    return replace(record, operations=tuple(map(operation, record.operations)), places=by(record.places))
