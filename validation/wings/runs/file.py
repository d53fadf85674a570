"""One rank's file of a long run: lines of JSON, one for the rank, then one for each step.

A tensor becomes a digest, a norm and eight projections in 120 letters, at any size. Lines are only appended, so a
killed job leaves all steps except a torn last line.
"""

import base64
import json
import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pipeproof.core.limits import FP32
from pipeproof.core.measured import versions
from pipeproof.core.observe.shards import Bounds, Shard
from pipeproof.core.observe.sketch import Sketch
from pipeproof.pipeline.files import cannot_read, open_regular
from pipeproof.records.record import RecordError
from pipeproof.worlds.output_file import finite

FORMAT, VERSION = "pipeproof/run", 2
STEPS = 4  # that are kept at hand: the one before is asked for, too
TENSORS = ("before", "gradients", "weights")
_FORM = struct.Struct("<16s9d")  # the digest, the norm, the projections
_CURE = "record it again, or leave the run out"
Options = Mapping[str, Mapping[str, object]]  # of optimizers, by parameter: learning rate, weight decay and others


@dataclass(frozen=True)
class RankParameter:
    """A parameter on a rank: its stage, the whole's shape and type, and where the rank's part of it lies.

    ``bounds``: empty for a whole parameter. The text form must be equal in two runs.
    """

    stage: int
    shape: tuple[int, ...]
    dtype: str
    bounds: Bounds = ()

    @property
    def shard(self) -> Shard:
        """Place of the shard."""
        return Shard(self.bounds or tuple((0, length) for length in self.shape), self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class RankHeader:
    """The writer: this rank among ``ranks``. ``parameters``: by the model's names, in the order of the lines' entries.

    ``every``: the recorder keeps every n-th step.
    """

    rank: int
    ranks: int
    parameters: Mapping[str, RankParameter]
    every: int = 1
    config: Mapping[str, str] = field(default_factory=versions)

    def line(self) -> str:
        """Return the file's first line."""
        return _line({"format": FORMAT, "version": VERSION, **vars(self)})


@dataclass(frozen=True)
class RankStep:
    """A step seen by one rank.

    before: weights at its start; a file has those changed since step ``after``, or all if None. gradients: None for a
    missing one. lying: places of gradients that are cut differently from their weights, or addends of a sum. options:
    the optimizer's, by parameter. clipped: gradients are the optimizer's, because the job does not report completion.
    computed: the narrowest computing type; empty if unobserved. problem: why the rank could not record it, in words.
    """

    number: int
    microbatches: tuple[str, ...] | None = None
    losses: tuple[float, ...] | None = None
    loss: float | None = None
    norm: float | None = None
    options: Options = field(default_factory=dict)
    before: Mapping[str, Sketch] = field(default_factory=dict)
    gradients: Mapping[str, Sketch | None] = field(default_factory=dict)
    lying: Mapping[str, Shard] = field(default_factory=dict)
    weights: Mapping[str, Sketch] = field(default_factory=dict)
    clipped: bool = False
    computed: str = ""
    after: int | None = None
    problem: str = ""

    def line(self, header: RankHeader) -> str:
        """Return its line in a file with this ``header``."""
        places: dict[str, list[int]] = {}
        for place, name in enumerate(header.parameters):
            places.setdefault(json.dumps(finite(self.options.get(name, {}))), []).append(place)
        options = [[json.loads(text), group] for text, group in places.items() if text != "{}"]
        tensors = dict[str, list[str | None]]()
        for what in TENSORS:
            found: Mapping[str, Sketch | None] = getattr(self, what)
            tensors[what] = [None] * len(header.parameters if found else ())
            for place, one in enumerate(map(found.get, header.parameters) if found else ()):
                if one is not None:
                    packed = _FORM.pack(one.digest, one.norm, *one.projections)
                    tensors[what][place] = base64.b64encode(packed).decode()
        lying = {name: [one.bounds, one.addend] for name, one in self.lying.items()}
        return _line({**vars(self), **tensors, "options": options, "lying": lying})


class RankFile:
    """One rank's file for reading: its header, and steps on demand.

    Raises ``RecordError`` for other files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts: dict[int, int] = {}  # of each step's line
        self._recent = lru_cache(STEPS)(self._read)
        with _refusing(path, ""), open_regular(path) as file:
            self.header = _header(path, file.readline())
            self.size = file.tell()  # of whole lines, in bytes
            for line in iter(file.readline, b""):
                if not line.endswith(b"\n"):
                    break  # the job was killed during the write
                with _refusing(path, f"was altered: what begins at byte {self.size} is no step; {_CURE}"):
                    number = _count(json.loads(line)["number"])
                # A resumed job repeats steps, and the latest counts.
                self._starts = {one: start for one, start in self._starts.items() if one < number}
                self._starts[number] = self.size
                self.size += len(line)
        self.numbers: Sequence[int] = list(self._starts)

    def step(self, number: int) -> RankStep:
        """Read this step, with all initial weights."""
        step = self._recent(number)
        left = {} if step.after is None else self._recent(step.after).weights
        return replace(step, before={**left, **step.before})

    def _read(self, number: int) -> RankStep:
        changed = f"was changed while it was read: step {number} is not where it was; compare once more"
        with _refusing(self.path, changed), open_regular(self.path) as file:
            file.seek(self._starts[number])
            data = json.loads(file.readline())
            if data["number"] != number:
                raise ValueError(f"it is step {data['number']}")
        with _refusing(self.path, f"was altered: step {number} has no such form; {_CURE}"):
            step = self._restore(data)
        # What a recorder never writes.
        place, why = bisect_left(self.numbers, number), ""
        earlier = self.numbers[place - 1] if place else None
        losses, microbatches, names = step.losses, step.microbatches, self.header.parameters.keys()
        whole = step.weights.keys() == names and (step.after is not None or step.before.keys() == names)
        if losses is not None and microbatches is not None and len(losses) != len(microbatches):
            why = f"has {len(losses)} losses of {len(microbatches)} microbatches"
        elif step.after not in (None, earlier):
            there = "none is" if earlier is None else f"that is {earlier}"
            why = f"goes on from step {step.after}, and {there} before it"
        elif not (whole or step.problem):
            why = "lacks weights"
        if why:
            raise RecordError(f"{self.path} was altered: step {number} {why}; {_CURE}")
        return step

    def _restore(self, data: Mapping[str, Any]) -> RankStep:
        names, tensors = list(self.header.parameters), dict[str, dict[str, Sketch | None]]()
        for what in TENSORS:
            tensors[what] = {}
            for (name, one), text in zip(self.header.parameters.items(), data[what], strict=bool(data[what])):
                tensors[what][name] = None
                if text is not None:
                    content, norm, *projections = _FORM.unpack(base64.b64decode(text))
                    tensors[what][name] = Sketch(one.shape, dtype_of(one.dtype), content, norm, tuple(projections))
        before, weights = (
            {name: one for name, one in tensors[what].items() if one is not None} for what in ("before", "weights")
        )
        if data["computed"]:
            dtype_of(data["computed"])
        return RankStep(
            data["number"],
            None if data["microbatches"] is None else tuple(map(str, data["microbatches"])),
            None if data["losses"] is None else tuple(map(float, data["losses"])),
            loss=None if data["loss"] is None else float(data["loss"]),
            norm=None if data["norm"] is None else float(data["norm"]),
            options={names[place]: dict(options) for options, places in data["options"] for place in places},
            before=before,
            gradients=tensors["gradients"],
            lying={name: self._place(name, *one) for name, one in data["lying"].items()},
            weights=weights,
            clipped=bool(data["clipped"]),
            computed=data["computed"],
            after=data["after"],
            problem=str(data["problem"]),
        )

    def _place(self, name: str, bounds: Any, addend: Any) -> Shard:
        own, count = map(_count, addend)
        if not own < count <= max(1, self.header.ranks):
            raise ValueError(f"number {own} of {count} addends is on no rank")
        return Shard(_bounds(bounds), self.header.parameters[name].shape, addend=(own, count))


@contextmanager
def _refusing(path: Path, otherwise: str) -> Iterator[None]:
    """Raise ``RecordError`` for unreadable or malformed input; ``otherwise``: the message for a file."""
    try:
        yield
    except RecordError:
        raise
    except OSError as error:
        raise RecordError(cannot_read(path, error)) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, struct.error) as error:
        raise RecordError(f"{path} {otherwise}") from error


def _header(path: Path, line: bytes) -> RankHeader:
    with _refusing(path, f"is no part of a run: expected a file that record_run wrote; {_CURE}"):
        data = json.loads(line)
        if data.pop("format") != FORMAT or not line.endswith(b"\n"):
            raise ValueError("it has another format")
    if (version := data.pop("version", None)) != VERSION:
        cure = "use the pipeproof that wrote it, or record it again"
        raise RecordError(f"{path} is of version {version} of runs: this pipeproof reads version {VERSION}; {cure}")
    with _refusing(path, f"was altered: its first line has no such form; {_CURE}"):
        parameters = {name: _parameter(**one) for name, one in data["parameters"].items()}
        ranks, every = _count(data["ranks"]), _count(data["every"])
        return RankHeader(_count(data["rank"]), ranks, parameters, every, dict(data["config"]))


def _parameter(stage: Any, shape: Any, dtype: Any, bounds: Any) -> RankParameter:
    dtype_of(dtype)
    one = RankParameter(_count(stage), tuple(map(_count, shape)), dtype, _bounds(bounds))
    if len(one.shard.bounds) != len(one.shape):
        raise ValueError(f"{one.bounds} is no part of {one}")
    return one


def dtype_of(name: str) -> torch.dtype:
    """Return the type with this name. Raises ``ValueError`` if unknown."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no type of torch")
    return found


def _bounds(pairs: Any) -> Bounds:
    return tuple((_count(start), _count(stop)) for start, stop in pairs)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value} is no number from 0")
    return value


def _line(data: Mapping[str, object]) -> str:
    return json.dumps(finite(data), allow_nan=False, separators=(",", ":"), default=vars) + "\n"


def other_options(expected: Options, observed: Options) -> str:
    """Describe the first parameter's different options; empty if all agree."""
    differences = {
        name: ", ".join(
            f"{option} {theirs.get(option)}, not {own.get(option)}"
            for option in {**own, **theirs}
            if not _same(own.get(option), theirs.get(option))
        )
        for name, own in expected.items()
        if (theirs := observed.get(name)) is not None
    }
    odd = [name for name, what in differences.items() if what]
    return f"{differences[odd[0]]} for {odd[0]}{f' and {len(odd) - 1} more' * (len(odd) > 1)}" if odd else ""


def _same(expected: object, observed: object) -> bool:
    """True if two options agree, up to rounding of a rate in fp32."""
    if isinstance(expected, float) and isinstance(observed, float):
        return expected == observed or abs(expected - observed) <= FP32.least * abs(expected)
    if isinstance(expected, list) and isinstance(observed, list):
        return len(expected) == len(observed) and all(map(_same, expected, observed))
    return expected == observed
