"""A step's config: one JSON file of what is run, on which axes, by which versions; a case is what of it is run here.

A record's header has the same words. A job that no machine here can run is scaled down to a case, and what that leaves
out is said.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from pipeproof.cases.case import DTYPES, MODELS, Case, CaseError, config_fields
from pipeproof.cases.primitives.stacks import PIPELINE, Stack
from pipeproof.judging.measured import versions
from pipeproof.pipeline.files import read_json
from pipeproof.pipeline.layouts.layout import Recompute
from pipeproof.pipeline.schedules import known_are
from pipeproof.pipeline.sizes import MOST_LAYERS, counted, some

FORMAT, VERSION = "pipeproof/config", 1
_MOST = 1 << 24  # of any size of a job
_RANKS = 4  # of a pipeline that stands for a longer one
_EACH = 2  # ranks along an axis, where a stack stands for a larger one
_MOST_ZERO = 3
_RECOMPUTE: Mapping[str, str] = MappingProxyType({"full": "recompute", "selective": "recompute-selective"})
_AXES = ("pp", "dp", "tp", "sp", "cp", "ep")
_REPLICAS = ("ddp", "zero-1", "zero-2", "zero-3", "ep")  # primitives whose ranks have microbatches of their own
STACKED = "decoder"  # the model of a config that is a stack as it stands
# What a job says and no case: axes, ZeRO's stage, what is computed again, sequences of a microbatch and their tokens.
LAYOUT: Mapping[str, int | str] = MappingProxyType(
    {"tp": 1, "sp": 1, "cp": 1, "ep": 1, "zero": 0, "recompute": "none", "micro": 1, "sequence": 0}
)
_BESIDE = [name for name in LAYOUT if name not in ("micro", "sequence")]  # those that a step of ours is without
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
    """What a config says, by its names: those of cases, of ``LAYOUT``, and versions; each of its type."""

    data: Mapping[str, Any]
    name: str = "the config"

    @cached_property
    def case(self) -> Case:
        """What of it is run here: all, where it is of a model of ours, and a small step of the same kind otherwise.

        Raises ``CaseError``, or ``ScheduleError``, where that cannot be.
        """
        if not self.scaled:
            if self.not_run:
                raise CaseError(
                    f"{self.name}: {', '.join(self.not_run)}: a case has pp and dp alone; leave it out, or say "
                    f'"model": "{STACKED}", which is run with more'
                )
            return Case.of_config(self.data)
        ranks, virtual = min(self["pp"], _RANKS), self["virtual"]
        stages = counted("layers", ranks * virtual, most=MOST_LAYERS)
        rounds = min(2, max(1, self["microbatches"] // self["pp"]))
        sizes = {"pp": ranks, "dp": 1, "microbatches": ranks * rounds, "split": [1] * stages}
        return Case.of_config({**self.data, **sizes, "model": MODELS[0], "dtype": DTYPES[0]})

    @cached_property
    def stack(self) -> Stack | None:
        """What of it is run here where it has more than a pipeline, or is of a stack's model. None: ``case`` is all.

        Each axis has at most two ranks, but as many as are said where the model is ``STACKED``. Raises ``StackError``
        or ``ScheduleError`` where that cannot be.
        """
        names = self._primitives
        beside = names if self._is_stack else set(names) - {PIPELINE}
        if not self.scaled or not beside:
            return None
        sizes = {name: size if self._is_stack else min(size, _EACH) for name, size in names.items()}
        line = ",".join(f"{name}={size}" if size else name for name, size in sizes.items())
        ranks = sizes.get(PIPELINE, 1)
        rounds = self["microbatches"] if self._is_stack else ranks * min(2, max(1, self["microbatches"] // self["pp"]))
        replicas = math.prod(sizes.get(name, 1) for name in _REPLICAS)
        virtual = self["virtual"] if PIPELINE in sizes else None
        return Stack.parse(
            line, schedule=self["schedule"], virtual=virtual, microbatches=rounds * replicas, seed=self["seed"] or 0
        )

    @property
    def _is_stack(self) -> bool:
        return bool(self["model"] == STACKED)

    @property
    def _primitives(self) -> dict[str, int]:
        """Those it asks for and a stack can have, in the order of a mesh, and their sizes; 0 of one that has none."""
        replicas = self["dp"] // self["ep"] if self["dp"] % self["ep"] == 0 else self["dp"]
        cut = "sp" if self["sp"] > 1 else "tp"
        sharded = "ddp" if self["zero"] == 0 or self._has_tensors_in_shards else f"zero-{self['zero']}"
        sizes = {
            PIPELINE: self["pp"],
            sharded: replicas,
            "ep": self["ep"],
            "cp": 1 if self["ep"] > 1 else self["cp"],
            cut: self[cut],
        }
        again = _RECOMPUTE.get(self["recompute"])
        return {name: size for name, size in sizes.items() if size > 1} | ({again: 0} if again else {})

    @property
    def _has_tensors_in_shards(self) -> bool:
        """Whether it asks for ZeRO-1 with what its optimizer does not take."""
        return bool(self["zero"] == 1 and max(self["tp"], self["sp"]) > 1)

    @property
    def scaled(self) -> bool:
        """Whether only a small step stands for it: its model is none of ours."""
        return self["model"] not in MODELS

    def __getitem__(self, name: str) -> Any:
        """What it says of ``name``, or what that is where nothing is said."""
        return self.data.get(name, _DEFAULTS.get(name))

    @property
    def not_run(self) -> list[str]:
        """What it asks for and no case has: ``tp 8``."""
        asked = [f"{name} {self[name]}" for name in _BESIDE if self[name] != LAYOUT[name]]
        return ([f"dp {self['dp']}"] if self.scaled and self["dp"] > 1 else []) + asked

    @property
    def notes(self) -> list[str]:
        """What a reader of a verdict on ``case`` must know: what stands for what, what is not run, other versions."""
        found = []
        if self.scaled:
            case = self.case
            found.append(
                f"{self.name} is run small: {case.ranks} of {self['pp']} pipeline ranks, {case.microbatches} of "
                f"{self['microbatches']} microbatches, {case.model} in {case.dtype} for {self['model']}"
            )
            found += [f"not run: {', '.join(self.not_run)}"] if self.not_run else []
        return found + self._other_versions

    @property
    def stack_notes(self) -> list[str]:
        """As ``notes``, of a verdict on ``stack``."""
        assert self.stack is not None, "there are no notes of a stack without one"
        found, stack = [], self.stack
        asked = [f"{name} {self[name]}" for name in ("pp", "dp", *LAYOUT) if name in _AXES and self[name] > 1]
        if not self._is_stack:
            found.append(
                f"{self.name} is run small: stack {stack} for {', '.join(asked)}, {stack.each} of "
                f"{self['microbatches']} microbatches, a decoder of {some(stack.layers, 'layer')} in fp32 for "
                f"{self['model']}"
            )
        found += [f"not run: {'; '.join(self.not_stacked)}"] if self.not_stacked else []
        return found + self._other_versions

    @property
    def not_stacked(self) -> list[str]:
        """What it asks for and its stack has not, with the reason."""
        found = []
        if self["zero"] and self["dp"] == self["ep"]:
            found.append(
                f"zero {self['zero']}, for no two replicas hold the same {'experts' * (self['ep'] > 1) or 'stage'}"
            )
        elif self._has_tensors_in_shards:
            found.append("zero 1, for torch's ZeroRedundancyOptimizer takes no DTensors, which tp and sp make")
        if self["ep"] > 1 and self["cp"] > 1:
            found.append(f"cp {self['cp']}, for with experts another model is trained than on one device")
        return found

    @property
    def _other_versions(self) -> list[str]:
        torch = versions()["torch"]
        other = self["torch"] not in (None, torch)
        return [f"{self.name} was written with torch {self['torch']}; this is {torch}"] if other else []

    def text(self) -> bytes:
        """The file."""
        words = {"format": FORMAT, "version": VERSION, **self.data}
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in words.items())
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read_config(path: str) -> Config:
    """The config in the file at ``path``. Raises ``CaseError`` or ``ScheduleError`` for what is none."""
    data = read_json(path, expected=_WANTED)
    if data.pop("format", None) != FORMAT:
        raise CaseError(f'{path} is no config: expected "format": "{FORMAT}", "version": {VERSION}; add them')
    if type(found := data.pop("version", None)) is not int or found != VERSION:
        raise CaseError(
            f"{path} is a config of version {found}: this pipeproof reads version {VERSION}; write it again"
        )
    _check_types(data, path)
    for name, least in _LEAST.items():
        most = _MOST_ZERO if name == "zero" else _MOST
        counted(f"{path}: {name}", data.get(name, least), least=least, most=most)
    if (again := data.get("recompute", "none")) not in list(Recompute):
        raise CaseError(f"{path}: unknown recompute {again!r}: {known_are(again, list(map(str, Recompute)))}")
    return Config(data, path)


def _check_types(data: Mapping[str, Any], path: str) -> None:
    """Raise ``CaseError`` unless ``data`` has all that a config must have, and nothing that none has."""
    known = {name: one.type for name, one in config_fields().items()}
    known |= {name: type(default) for name, default in LAYOUT.items()} | dict.fromkeys(versions(), str)
    for name, value in data.items():
        if name not in known:
            raise CaseError(f"{path} has {name!r}, which no config has: {known_are(name, list(known))}")
        if not _is(value, known[name]):
            raise CaseError(f"{path}: {name} is {json.dumps(value)}: expected {_TYPES[known[name]]}")
    required = [name for name, one in config_fields().items() if one.default is MISSING]
    if lost := next((name for name in required if name not in data), None):
        raise CaseError(f"{path} has no {lost}: a config has {', '.join(required)} at least; add it")


def _is(value: object, kind: object) -> bool:
    if kind in (tuple[int, ...], tuple[str, ...]):
        each = int if kind == tuple[int, ...] else str
        return isinstance(value, list) and all(_is(one, each) for one in value)
    return type(value) is kind  # true is no number
