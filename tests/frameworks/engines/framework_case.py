"""A case of a framework's own engine, as a value and as the line that replays it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from pipeproof.own.case import CaseError
from pipeproof.pipeline.schedules import list_known
from pipeproof.pipeline.sizes import MOST_LAYERS, MOST_MICROBATCHES, MOST_PROCESSES, MOST_SEED, check_count
from tests.frameworks.engines.deepspeed_layout import DeepSpeedLayout
from tests.frameworks.engines.framework_layout import FrameworkLayout
from tests.frameworks.engines.megatron_layout import MegatronLayout
from tests.frameworks.engines.torchtitan_layout import TorchtitanLayout

LAYOUTS: Mapping[str, type[FrameworkLayout]] = MappingProxyType(
    {one.framework: one for one in (MegatronLayout, DeepSpeedLayout, TorchtitanLayout)}
)
FRAMEWORKS = tuple(LAYOUTS)
_EXAMPLE = "megatron r2 v1 m4 dp1 layers=4 tied seed=17"
_HEAD = re.compile(r"(\w+)\s+r(\d+)\s+v(\d+)\s+m(\d+)\s+dp(\d+)(?!\S)", flags=re.ASCII)
# What stands behind the name of an option, by the type of its default.
_FORMS = {bool: re.compile(""), str: re.compile("=.*"), int: re.compile(r"=\d{1,18}", flags=re.ASCII)}


@dataclass(frozen=True)
class FrameworkCase:
    """One step of an engine, from weights and data of the layout's seed; it has what ``fuzz`` asks of any case.

    ``str(case)`` is the replay line and ``parse`` its inverse. Raises ``CaseError``, or ``ScheduleError`` for a number
    out of bounds. microbatches: those of each replica.
    """

    layout: FrameworkLayout
    microbatches: int = 4

    def __post_init__(self) -> None:
        layout = self.layout
        check_count("ranks", layout.pp, most=MOST_PROCESSES)
        check_count("replicas", layout.dp, most=MOST_PROCESSES // layout.pp)
        check_count("stages on a rank", layout.vp, most=MOST_LAYERS // layout.pp)
        check_count("layers", layout.layers, most=MOST_LAYERS)
        check_count("microbatches", self.microbatches, most=MOST_MICROBATCHES)
        check_count("seed", layout.seed, least=0, most=MOST_SEED)
        for name, one in layout.told().items():
            if isinstance(value := getattr(layout, one.name), int):
                check_count(name, value, least=0, most=MOST_LAYERS)
        if why := layout.why_not(self.microbatches):
            raise CaseError(f"{self} cannot be: {why}")

    @property
    def framework(self) -> str:
        """Whose engine runs it."""
        return self.layout.framework

    @property
    def schedule(self) -> str:
        """What the engine's schedule is called."""
        return self.layout.order

    @property
    def stages(self) -> int:
        return self.layout.pp * self.layout.vp

    @property
    def layers(self) -> int:
        return self.layout.layers

    @property
    def replicas(self) -> int:
        return self.layout.dp

    @property
    def processes(self) -> int:
        """The ranks of all replicas."""
        return self.layout.pp * self.layout.dp

    @property
    def dtype(self) -> str:
        return self.layout.dtype

    @property
    def bindings(self) -> str:
        """What the case's letters stand for, as a reader wants them beside a failure."""
        one = self.layout
        sizes = f"P {one.pp}, V {one.vp}, M {self.microbatches}, {one.layers} layers"
        return f"{self.framework}, {self.schedule}, {sizes}, {one.dp} replicas, seed {one.seed}"

    def __str__(self) -> str:
        one = self.layout
        head = f"{one.framework} r{one.pp} v{one.vp} m{self.microbatches} dp{one.dp} layers={one.layers}"
        values = {name: (getattr(one, own.name), own.default) for name, own in one.told().items()}
        words = (
            name if value is True else f"{name}={value}" for name, (value, plain) in values.items() if value != plain
        )
        return " ".join([head, *words, f"seed={one.seed}"])

    @classmethod
    def parse(cls, text: str) -> "FrameworkCase":
        """The case that ``text`` spells: ``megatron r2 v1 m4 dp1 layers=4 tied seed=17``; the rest has defaults."""
        head = _HEAD.match(text)
        if head is None or head[1] not in LAYOUTS:
            raise CaseError(
                f"{text!r} is no case of a framework: expected one of {', '.join(FRAMEWORKS)}, then ranks, stages on "
                f"each, microbatches and replicas, e.g. {_EXAMPLE}"
            )
        layout = LAYOUTS[head[1]]
        known = {one.name: one for one in fields(layout) if one.name in ("layers", "seed")} | layout.told()
        told: dict[str, Any] = {}
        for each in text[head.end() :].split():
            name, _, value = each.partition("=")
            field = known.get(name)
            if field is None or not _FORMS[type(field.default)].fullmatch(each.removeprefix(name)):
                raise CaseError(f"{text!r}: {each!r} is no option: {list_known(name, list(known))}")
            if field.name in told:
                raise CaseError(f"{text!r}: {name} is said twice")
            told[field.name] = type(field.default)(value or True)
        pp, vp, microbatches, dp = (int(head[number]) for number in (2, 3, 4, 5))
        return cls(layout(pp=pp, vp=vp, dp=dp, **told), microbatches)
