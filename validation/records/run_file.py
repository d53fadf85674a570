"""What one rank keeps of a run of many steps: a file of lines in JSON, one about the rank, then one for each step.

A tensor is a digest, a norm and eight projections in 120 letters, however large it is. Lines are only ever added, so a
job that is killed leaves all its steps but the one whose line is torn.
"""

import base64
import json
import struct
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from pipeproof.core.measured import versions
from pipeproof.observers.shards import Bounds, Shard
from pipeproof.observers.sketch import Sketch
from pipeproof.pipeline.files import cannot_read, open_regular
from pipeproof.records.record import RecordError
from pipeproof.worlds.output_file import finite

FORMAT, VERSION = "pipeproof/run", 2
STEPS = 4  # that are kept at hand: the one before is asked for, too
_FORM = struct.Struct("<16s9d")  # the digest, the norm, the projections
_CURE = "record it again, or leave the run out"


@dataclass(frozen=True)
class Held:
    """A parameter as a rank holds it: its stage, the whole's shape and type, and where the rank's part of it lies.

    ``bounds`` is empty where the rank has all of it.
    """

    stage: int
    shape: tuple[int, ...]
    dtype: str
    bounds: Bounds = ()

    @property
    def form(self) -> tuple[tuple[int, ...], str]:
        """What must be the same in two runs."""
        return self.shape, self.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its type, as torch has it."""
        return dtype_of(self.dtype)

    @property
    def shard(self) -> Shard:
        """Where it lies."""
        return Shard(self.bounds or tuple((0, length) for length in self.shape), self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class RankHeader:
    """Who writes: this rank, of so many. ``parameters`` by their name in the model, in the order that lines have.

    ``every``: one step of so many is kept.
    """

    rank: int
    ranks: int
    parameters: Mapping[str, Held]
    every: int = 1
    config: Mapping[str, str] = field(default_factory=versions)

    def line(self) -> str:
        """The first of its file."""
        parameters = {name: vars(one) for name, one in self.parameters.items()}
        return _line({"format": FORMAT, "version": VERSION, **vars(self), "parameters": parameters})


@dataclass(frozen=True)
class RankStep:
    """A step as one rank saw it.

    before: weights that are not those which the last step that was kept left; ``after`` is its number, None where all
    weights are there. gradients: None in place of one that is none. lying: where gradients are that do not lie as their
    weights do, or are addends of a sum. options: what the optimizer was told, by parameter. clipped: nobody said when
    gradients were complete, so they are those that the optimizer was given. computed: the narrowest type that modules
    compute in; empty where none was seen. problem: why the rank could not keep it, in words.
    """

    number: int
    microbatches: tuple[str, ...] | None = None
    losses: tuple[float, ...] | None = None
    loss: float | None = None
    norm: float | None = None
    options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    before: Mapping[str, Sketch] = field(default_factory=dict)
    gradients: Mapping[str, Sketch | None] = field(default_factory=dict)
    lying: Mapping[str, Shard] = field(default_factory=dict)
    weights: Mapping[str, Sketch] = field(default_factory=dict)
    clipped: bool = False
    computed: str = ""
    after: int | None = None
    problem: str = ""

    def line(self, header: RankHeader) -> str:
        """Its line in the file that has this ``header``."""
        groups: dict[str, list[int]] = {}
        for place, name in enumerate(header.parameters):
            groups.setdefault(json.dumps(finite(self.options.get(name, {}))), []).append(place)
        tensors = {
            what: [_packed(found.get(name)) for name in header.parameters] if found else []
            for what, found in (("before", self.before), ("gradients", self.gradients), ("weights", self.weights))
        }
        options = [[json.loads(said), places] for said, places in groups.items() if said != "{}"]
        lying = {name: [one.bounds, one.addend] for name, one in self.lying.items()}
        return _line({**vars(self), **tensors, "options": options, "lying": lying})


class RankFile:
    """The file of one rank, to read: its header, and each step when it is asked for.

    Raises ``RecordError`` for what is no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = lru_cache(STEPS)(self._step)  # the step of this number
        self._starts: dict[int, int] = {}  # of each step's line
        try:
            with open_regular(path) as file:
                self.header = _header(path, file.readline())
                self.whole = file.tell()  # bytes of whole lines
                for line in iter(file.readline, b""):
                    if line.endswith(b"\n"):  # else the job was killed while it wrote this
                        self._index(line, self.whole)
                        self.whole += len(line)
        except OSError as error:
            raise RecordError(cannot_read(path, error)) from error

    @cached_property
    def numbers(self) -> Sequence[int]:
        """Of its steps, in their order."""
        return list(self._starts)

    def before(self, number: int) -> RankStep | None:
        """The last step before this one."""
        earlier = self._earlier(number)
        return None if earlier is None else self.step(earlier)

    def _earlier(self, number: int) -> int | None:
        place = bisect_left(self.numbers, number)
        return self.numbers[place - 1] if place else None

    def _step(self, number: int) -> RankStep:
        try:
            with open_regular(self.path) as file:
                file.seek(self._starts[number])
                data = json.loads(file.readline())
            if data["number"] != number:
                raise ValueError(f"it is step {data['number']}")
        except OSError as error:
            raise RecordError(cannot_read(self.path, error)) from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RecordError(
                f"{self.path} was changed while it was read: step {number} is not where it was; compare once more"
            ) from error
        return self._restored(data)

    def _index(self, line: bytes, start: int) -> None:
        """Note where a step's line is. A job that was resumed goes on from an earlier step, which it makes anew."""
        try:
            number = _count(json.loads(line)["number"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RecordError(f"{self.path} was altered: what begins at byte {start} is no step; {_CURE}") from error
        for later in [one for one in self._starts if one >= number]:
            del self._starts[later]
        self._starts[number] = start

    def _restored(self, data: dict[str, Any]) -> RankStep:
        names = list(self.header.parameters)
        try:
            tensors = {what: self._tensors(data[what]) for what in ("before", "gradients", "weights")}
            given = {names[place]: dict(said) for said, places in data["options"] for place in places}
            if data["computed"]:
                dtype_of(data["computed"])
            step = RankStep(
                data["number"],
                _each(data["microbatches"], str),
                _each(data["losses"], float),
                loss=None if data["loss"] is None else float(data["loss"]),
                norm=None if data["norm"] is None else float(data["norm"]),
                options=given,
                before={name: one for name, one in tensors["before"].items() if one is not None},
                gradients=tensors["gradients"],
                lying={name: self._placed(name, *one) for name, one in data["lying"].items()},
                weights={name: one for name, one in tensors["weights"].items() if one is not None},
                clipped=bool(data["clipped"]),
                computed=data["computed"],
                after=data["after"],
                problem=str(data["problem"]),
            )
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, struct.error) as error:
            raise RecordError(
                f"{self.path} was altered: step {data.get('number')} has no such form; {_CURE}"
            ) from error
        losses, microbatches = step.losses, step.microbatches
        if losses is not None and microbatches is not None and len(losses) != len(microbatches):
            told = f"step {step.number} has {len(losses)} losses of {len(microbatches)} microbatches"
            raise RecordError(f"{self.path} was altered: {told}; {_CURE}")
        if not step.problem:
            self._check_weights(step)
        return step

    def _tensors(self, texts: list[str | None]) -> dict[str, Sketch | None]:
        return {
            name: self._unpacked(name, text) for name, text in zip(self.header.parameters, texts, strict=bool(texts))
        }

    def _check_weights(self, step: RankStep) -> None:
        """Raise ``RecordError`` where not all weights are there that the step began with, and that it left."""
        names, earlier = self.header.parameters.keys(), self._earlier(step.number)
        if step.after is not None and step.after != earlier:
            there = "none is" if earlier is None else f"that is {earlier}"
            raise RecordError(
                f"{self.path} was altered: step {step.number} goes on from step {step.after}, and {there} before it; "
                f"{_CURE}"
            )
        if step.weights.keys() != names or (step.after is None and step.before.keys() != names):
            raise RecordError(f"{self.path} was altered: step {step.number} lacks weights; {_CURE}")

    def _placed(self, name: str, bounds: Any, addend: Any) -> Shard:
        own, count = map(_count, addend)
        if not own < count <= max(1, self.header.ranks):
            raise ValueError(f"number {own} of {count} addends is on no rank")
        return Shard(_bounds(bounds), self.header.parameters[name].shape, addend=(own, count))

    def _unpacked(self, name: str, text: str | None) -> Sketch | None:
        if text is None:
            return None
        held = self.header.parameters[name]
        content, norm, *projections = _FORM.unpack(base64.b64decode(text))
        return Sketch(held.shape, held.torch_dtype, content, norm, tuple(projections))


def _header(path: Path, line: bytes) -> RankHeader:
    try:
        data = json.loads(line)
        known = data.pop("format") == FORMAT
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        known = False
    if not known or not line.endswith(b"\n"):
        raise RecordError(f"{path} is no part of a run: expected a file that record_run wrote; {_CURE}")
    if (version := data.pop("version", None)) != VERSION:
        cure = "use the pipeproof that wrote it, or record it again"
        raise RecordError(f"{path} is of version {version} of runs: this pipeproof reads version {VERSION}; {cure}")
    try:
        held = {
            name: Held(_count(one["stage"]), tuple(map(_count, one["shape"])), one["dtype"], _bounds(one["bounds"]))
            for name, one in data["parameters"].items()
        }
        for one in held.values():
            dtype_of(one.dtype)
            if len(one.shard.bounds) != len(one.shape):
                raise ValueError(f"{one.bounds} is no part of {one}")
        ranks, every = _count(data["ranks"]), _count(data["every"])
        return RankHeader(_count(data["rank"]), ranks, held, every, dict(data["config"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RecordError(f"{path} was altered: its first line has no such form; {_CURE}") from error


def dtype_of(name: str) -> torch.dtype:
    """The type of this name. Raises ``ValueError`` where there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no type of torch")
    return found


def _bounds(said: Any) -> Bounds:
    return tuple((_count(start), _count(stop)) for start, stop in said)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value} is no number from 0")
    return value


def _packed(sketch: Sketch | None) -> str | None:
    if sketch is None:
        return None
    return base64.b64encode(_FORM.pack(sketch.digest, sketch.norm, *sketch.projections)).decode()


def _each(values: Sequence[Any] | None, kind: Any) -> Any:
    return None if values is None else tuple(map(kind, values))


def _line(data: Mapping[str, object]) -> str:
    return json.dumps(finite(data), allow_nan=False, separators=(",", ":")) + "\n"
