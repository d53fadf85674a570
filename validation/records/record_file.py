"""Records on disk: one safetensors file, with JSON in its metadata for everything else; nothing is pickled.

A tensor is stored once, under its content's digest, for any number of names. Reading checks one tensor at a time, and a
rank reads only its own stage. The JSON has its own digest.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeproof.core.limits import BY_NAME
from pipeproof.core.nudged import Nudged
from pipeproof.core.observe.elements import bits
from pipeproof.core.observe.recording import Gradients
from pipeproof.core.tolerance import Floor
from pipeproof.pipeline.files import cannot_read, open_regular
from pipeproof.records.record import (
    RankStage,
    Record,
    RecordedFloors,
    RecordedOperation,
    RecordError,
    digest,
)
from pipeproof.worlds.output_file import OutputFile, finite

FORMAT, VERSION = "pipeproof/record", 1
_LENGTH = 8  # bytes of the number that every safetensors file begins with: how long its header is
_BEGINNING = b'{"__metadata__"'  # of the header, which follows
_CURE = "record it again"
_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PLAIN = frozenset((*_REAL, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))

Fetch = Callable[[str], Tensor]


class Addressed(Mapping[str, Tensor | None]):
    """Tensors by name, fetched by content digest on demand; the last stays in memory."""

    def __init__(self, digests: Mapping[str, str | None], fetch: Fetch) -> None:
        self.digests = dict(digests)
        self._fetch = fetch
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor | None:
        if (address := self.digests[name]) is None:
            return None
        if self._last is None or self._last[0] != address:
            self._last = None  # one at a time is in memory
            self._last = address, self._fetch(address)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.digests)

    def __len__(self) -> int:
        return len(self.digests)


def write(record: Record, file: OutputFile) -> None:
    """Write ``record`` to ``file``, whole or not at all."""
    from safetensors import SafetensorError  # here: a check beside the model needs no file
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    text = describe(record, tensors)
    metadata = {"format": FORMAT, "version": str(VERSION), "record": text, "sha256": _sha256(text)}
    try:
        plain = {address: tensor.detach().cpu().contiguous() for address, tensor in tensors.items()}
        # As bytes, if safetensors may not know its type.
        stored = {key: one if one.dtype in _PLAIN else bits(one).view(torch.uint8) for key, one in plain.items()}
        file.write(_in_order(save(stored, metadata)))
    except (SafetensorError, KeyError) as error:
        raise RecordError(f"a tensor cannot be recorded: {error}") from error


def _in_order(content: bytes) -> bytes:
    """Sort a safetensors file's metadata: equal records, equal bytes; safetensors orders them at random.

    A header too long for its place stays unsorted.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return content if len(text) > end - 8 else b"".join([content[:8], text.ljust(end - 8), memoryview(content)[end:]])


def read(path: str | Path) -> Record:
    """Read the record at ``path``. Raises ``RecordError`` unless it is a whole and unaltered record.

    Tensors are read and checked on demand.
    """
    from safetensors import SafetensorError, safe_open

    if path == "":
        raise RecordError("cannot read a file whose name is empty; give it one")
    metadata = _metadata(Path(path))
    if _sha256(metadata["record"]) != metadata["sha256"]:
        raise _altered_error(path, "its description")
    try:
        stored: Any = safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise _altered_error(path, f"its header ({error})") from error
    known, forms = set(stored.keys()), json.loads(metadata["record"]).get("forms", {})

    def fetch(address: str) -> Tensor:
        tensor: Tensor | None = stored.get_tensor(address) if address in known else None
        if tensor is not None and address in forms:
            name, shape = forms[address]
            tensor = tensor.view(getattr(torch, name)).reshape(shape)
        if tensor is None or digest(tensor) != address:
            raise _altered_error(path, f"tensor {address[:12]}")
        return tensor

    try:
        return restore(metadata["record"], fetch)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        lacks = f"it lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise RecordError(
            f"{path} is a record of version {VERSION} in a form that this pipeproof does not know ({lacks}); "
            f"use the pipeproof that wrote it, or {_CURE}"
        ) from error


def describe(record: Record, tensors: dict[str, Tensor]) -> str:
    """Serialise ``record`` as JSON with digests for tensors; add the tensors to ``tensors`` under their digests."""

    def addresses(named: Gradients) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for name, tensor in named.items():
            address = found[name] = None if tensor is None else digest(tensor)
            if tensor is not None and address is not None:
                tensors.setdefault(address, tensor)
        return found

    operations = [
        vars(one)
        | {name: addresses(getattr(one, name)) for name in _TENSORS}
        | {"floors": None if one.floors is None else asdict(one.floors)}
        for one in record.operations
    ]
    places = {name: list(found) for name, found in record.places.items()}
    forms = {
        address: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for address, tensor in tensors.items()
        if tensor.dtype not in _PLAIN
    }
    data = {"kind": record.kind, "config": dict(record.config), "operations": operations, "places": places}
    return json.dumps(finite({**data, "forms": forms} if forms else data), allow_nan=False)


_TENSORS = ("before", "gradients", "parameters", "buffers")
_OF_A_FLOOR = {"permutation", "rounding", "fault", "nudged", "size", "led"}


def restore(text: str, fetch: Fetch) -> Record:
    """Restore a record from the ``text`` of ``describe``; ``fetch`` returns a digest's tensor.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` for another form. Older records lack some fields.
    """
    data = json.loads(text)
    if not isinstance(data["config"], dict):
        raise ValueError("its config is no mapping")
    operations = tuple(_operation(one, fetch) for one in data["operations"])
    places = {name: tuple(_place(*one) for one in found) for name, found in data["places"].items()}
    return Record(data["kind"], data["config"], operations, places)


def _place(rank: int, stage: int) -> RankStage:
    if not (isinstance(rank, int) and isinstance(stage, int) and rank >= 0 and stage >= 0):
        raise ValueError(f"rank {rank!r} and stage {stage!r} are no place")
    return rank, stage


def _operation(data: Mapping[str, Any], fetch: Fetch) -> RecordedOperation:
    """Restore an operation, if it is whole: only gradients are None, and each has its floor."""
    for what in ("before", "parameters", "buffers"):
        if lost := next((name for name, address in data[what].items() if address is None), None):
            raise ValueError(f"{what} has no tensor for {lost}")
    floors = data["floors"]
    if floors is not None and len(floors["losses"]) != len(data["losses"]):
        raise ValueError(f"{len(data['losses'])} losses have {len(floors['losses'])} floors")
    if floors is not None and (
        lost := next((name for name in data["gradients"] if name not in floors["gradients"]), "")
    ):
        raise ValueError(f"the gradient of {lost} has no floor")
    return RecordedOperation(
        data["operation"],
        tuple(data["microbatches"]),
        tuple(map(float, data["losses"])),
        None if data["loss"] is None else float(data["loss"]),
        None if data["norm"] is None else float(data["norm"]),
        **{name: Addressed(data[name], fetch) for name in _TENSORS},  # type: ignore[arg-type]
        floors=None if floors is None else _floors(floors),
        contents=tuple(data.get("contents", ())),
    )


def _floors(data: Mapping[str, Any]) -> RecordedFloors:
    gradients, updates = (
        {name: _floor(one) for name, one in data.get(what, {}).items()} for what in ("gradients", "updates")
    )
    moved: dict[str, Any] | None = data.get("moved")
    if moved:
        moved = {what: _numbers(one) if isinstance(one, dict) else float(one) for what, one in moved.items()}
    losses, norm = tuple(map(_floor, data["losses"])), _floor(data["norm"])
    return RecordedFloors(losses, norm, gradients, Nudged(**moved) if moved else None, updates)


def _floor(data: Mapping[str, Any]) -> Floor:
    said = data["precision"]
    sums = _floor(data["sums"]) if data.get("sums") else None
    numbers: dict[str, Any] = _numbers({name: data[name] for name in data.keys() & _OF_A_FLOOR})
    return Floor(**numbers, precision=replace(BY_NAME[said["name"]], least=float(said["least"])), sums=sums)


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    """Read numbers back: those that are not finite are text."""
    return {name: float(number) for name, number in data.items()}


def _metadata(path: Path) -> dict[str, str]:
    """Read a record file's metadata, after checks: a record, whole, and a known version."""
    try:
        with open_regular(path) as file:
            length, size = int.from_bytes(file.read(_LENGTH), "little"), path.stat().st_size
            text = file.read(min(length, size))
    except OSError as error:
        raise RecordError(cannot_read(path, error)) from error
    if _LENGTH + length > size and _BEGINNING in text[: 2 * len(_BEGINNING)]:
        raise RecordError(f"{path} is cut short: it has {size} bytes, and its header alone is longer; {_CURE}")
    try:
        header = json.loads(text)
        found: dict[str, str] = header.pop("__metadata__")
        known = found.get("format") == FORMAT
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # no text, no JSON, or of another form
        known = False
    if not known and b'"pipeproof/config"' in text[:1000]:
        record = f"`pipeproof record --config {path} --record FILE`"
        raise RecordError(f"{path} is a config, and no record: {record} writes what is expected of it")
    if not known:
        raise RecordError(f"{path} is no record: expected a file that `pipeproof record` or --record wrote")
    if found.get("version") != str(VERSION):
        raise RecordError(
            f"{path} is a record of version {found.get('version')}: this pipeproof reads version {VERSION}; "
            f"use the pipeproof that wrote it, or {_CURE}"
        )
    if not {"record", "sha256"} <= found.keys():
        raise _altered_error(path, "its description")
    try:
        expected = _LENGTH + length + max((int(one["data_offsets"][1]) for one in header.values()), default=0)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise _altered_error(path, "its header") from error
    if size != expected:
        raise RecordError(
            f"{path} is {'cut short' if size < expected else 'too long'}: {size} bytes of {expected}; {_CURE}"
        )
    return found


def _altered_error(path: str | Path, what: str) -> RecordError:
    return RecordError(f"{path} was altered since it was written: {what} is not what its checksum says; {_CURE}")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
