"""Step configs: one JSON file with model, axes and versions.

Record headers use the same words.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from types import MappingProxyType
from typing import Any

from pipeproof.core.measured import versions
from pipeproof.own.case import MODELS, CaseError, config_fields
from pipeproof.pipeline.files import read_json
from pipeproof.pipeline.schedules import list_known
from pipeproof.pipeline.sizes import check_count
from pipeproof.worlds import accelerator

FORMAT, VERSION = "pipeproof/config", 1
_MOST = 1 << 24  # upper bound for all sizes
_MOST_ZERO = 3
_RECOMPUTE = ["none", "selective", "full"]
# Fields beyond cases: axes, ZeRO stage, recomputation, sequences per microbatch, tokens per sequence.
LAYOUT: Mapping[str, int | str] = MappingProxyType(
    {"tp": 1, "sp": 1, "cp": 1, "ep": 1, "zero": 0, "recompute": "none", "micro": 1, "sequence": 0}
)
BESIDE = [name for name in LAYOUT if name not in ("micro", "sequence")]  # fields without a counterpart in cases
STACKED = "decoder"  # model name for a plain layer stack
_DEFAULTS = {name: one.default for name, one in config_fields().items() if one.default is not MISSING} | dict(LAYOUT)
_LEAST = {"pp": 1, "dp": 1, "virtual": 1, "microbatches": 1} | {
    name: min(default, 1) for name, default in LAYOUT.items() if isinstance(default, int)
}
_WANTED = "the config of a step"
_TYPES: Mapping[object, str] = MappingProxyType(
    {
        int: "a whole number",
        str: "text",
        bool: "true or false",
        tuple[int, ...]: "a list of whole numbers",
        tuple[str, ...]: "a list of texts",
    }
)


@dataclass(frozen=True)
class Config:
    """A config's entries, typed: case fields, ``LAYOUT`` fields, and versions."""

    data: Mapping[str, Any]
    name: str = "the config"

    def __getitem__(self, name: str) -> Any:
        """Return the entry ``name``, or its default."""
        return self.data.get(name, _DEFAULTS.get(name))

    @property
    def is_scaled(self) -> bool:
        """True for a model outside the cases' own."""
        return self["model"] not in MODELS

    @property
    def rounds(self) -> int:
        """Number of pipeline fills in its scaled-down case."""
        return 2 if self["microbatches"] >= 2 * self["pp"] else 1

    def list_extras(self, *names: str) -> list[str]:
        """List non-default entries among ``names``, such as ``tp 8``."""
        return [f"{name} {self[name]}" for name in names if self[name] != LAYOUT.get(name, 1)]

    def text(self) -> bytes:
        """Serialize the file."""
        words = {"format": FORMAT, "version": VERSION, **self.data}
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in words.items())
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read_config(path: str) -> Config:
    """Read the config at ``path``. Raises ``CaseError`` or ``ScheduleError`` if invalid."""
    data = read_json(path, expected=_WANTED)
    if data.pop("format", None) != FORMAT:
        raise CaseError(f'{path} is no config: expected "format": "{FORMAT}", "version": {VERSION}; add them')
    if type(found := data.pop("version", None)) is not int or found != VERSION:
        raise CaseError(
            f"{path} is a config of version {json.dumps(found)}: this pipeproof reads version {VERSION}; write it again"
        )
    known = {name: one.type for name, one in config_fields().items()}
    known |= {name: type(default) for name, default in LAYOUT.items()} | dict.fromkeys(versions(), str)
    for name, value in data.items():
        if name not in known:
            raise CaseError(f"{path} has {name!r}, which no config has: {list_known(name, list(known))}")
        if not _is(value, known[name]):
            raise CaseError(f"{path}: {name} is {json.dumps(value)}: expected {_TYPES[known[name]]}")
    required = [name for name, one in config_fields().items() if one.default is MISSING]
    if lost := next((name for name in required if name not in data), None):
        raise CaseError(f"{path} has no {lost}: a config has {', '.join(required)} at least; add it")
    for name, least in _LEAST.items():
        most = _MOST_ZERO if name == "zero" else _MOST
        check_count(f"{path}: {name}", data.get(name, least), least=least, most=most)
    if (again := data.get("recompute", "none")) not in _RECOMPUTE:
        raise CaseError(f"{path}: unknown recompute {again!r}: {list_known(again, _RECOMPUTE)}")
    if why := accelerator.refusal(data.get("device", accelerator.CPU)):
        raise CaseError(f"{path}: {why}")
    config = Config(data, path)
    dp, tp, sp, cp, ep = (config[name] for name in ("dp", "tp", "sp", "cp", "ep"))
    if tp > 1 and sp > 1:
        same = "sp cuts layers as tp does, and sequences too"
        raise CaseError(f"{path}: tp {tp} and sp {sp} do the same work: {same}; leave one out")
    if dp * cp % ep:
        over = f"ep {ep} does not divide dp * cp {dp * cp}"
        raise CaseError(f"{path}: {over}: experts are spread over these ranks; use a divisor")
    return config


def _is(value: object, kind: object) -> bool:
    if kind in (tuple[int, ...], tuple[str, ...]):
        each = int if kind == tuple[int, ...] else str
        return isinstance(value, list) and all(_is(one, each) for one in value)
    return type(value) is kind  # booleans are no numbers
