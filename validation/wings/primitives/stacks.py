"""A stack: which primitives, over how many ranks each, as a line says it: ``pp=2,tp=2,ddp=2``."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pipeproof.pipeline.schedules import build, canonical_name, list_known, virtuals
from pipeproof.pipeline.sizes import MOST_MICROBATCHES, MOST_PROCESSES, MOST_SEED, check_count
from pipeproof.wings.primitives.primitive import ALIASES, PRIMITIVES, VARIANTS, Level, primitive_of

# Of the small decoder under the primitives.
WIDTH, HEADS, SEQUENCE, VOCABULARY = 16, 4, 16, 32
EXPERTS, CHOSEN, CAPACITY = 4, 2, 1.25  # a token visits CHOSEN; an expert takes CAPACITY times its even share
BATCH = 3  # sequences of a microbatch
EACH = 2  # ranks along an axis of which nothing is said, or that stands for a larger one
PIPELINE = "pp"
ONE_DEVICE = "one-device"  # the line of a stack of nothing
_CUTS = (  # what the ranks of an axis share evenly
    ("sp", SEQUENCE, f"sequence {SEQUENCE}"),
    ("tp", HEADS, f"heads {HEADS}"),
    ("sp", HEADS, f"heads {HEADS}"),
    ("ep", EXPERTS, f"{EXPERTS} experts"),
)
_APART = ("ddp", "zero-1")  # replicas that meet once a step, and so may have unequal shares


class StackError(ValueError):
    """A stack that cannot run."""


@dataclass(frozen=True)
class Stack:
    """``sizes`` of the mesh by axis, in rows; ``parts``: its primitives, innermost first.

    schedule, virtual: for the pipeline, if pp is an axis. microbatches: in the whole step. seed: for weights and data.
    dropout: the decoder's, drawn from the bits of a layer's input, so inputs must equal the model's. blocks: the
    decoder's; empty: with experts along ep, else plain.
    """

    sizes: Mapping[str, int]
    parts: tuple[str, ...]
    schedule: str = "1f1b"
    virtual: int = 1
    microbatches: int = 4
    seed: int = 0
    dropout: float = 0
    blocks: str = ""

    @classmethod
    def parse(
        cls, line: str, *, schedule: str = "1f1b", virtual: int | None = None, microbatches: int = 4, seed: int = 0
    ) -> "Stack":
        """``pp=2,tp=2,ddp=2``: axes in the order of the mesh. Raises ``StackError`` or ``ScheduleError``.

        A primitive of two axes has two sizes: ``hsdp=2x2``. One that has none stands alone. ``ONE_DEVICE`` has none at
        all. virtual: None is the
        schedule's own number, 2 for a loop.
        """
        sizes: dict[str, int] = {}
        names = list[str]()
        for item in [] if line.strip().lower() == ONE_DEVICE else line.split(","):
            if not item.strip():
                where = " between commas" if "," in line else ""
                raise StackError(f"stack {line!r} names no primitive{where}: expected some, e.g. pp=2,tp=2,ddp=2")
            name, along = _item(item.strip(), line)
            if taken := [axis for axis in along if axis in sizes] or [name] * (name in names):
                raise StackError(f"stack {line!r} has {taken[0]} twice: leave one out")
            sizes |= along
            names.append(name)
        parts = sorted((name for name in names if name != PIPELINE), key=lambda name: primitive_of(name).level)
        own = _virtual(schedule) if virtual is None else virtual
        found = cls(sizes, tuple(parts), schedule, own if PIPELINE in sizes else 1, microbatches, seed)
        found.check()
        return found

    def check(self) -> None:
        """Raise ``StackError`` or ``ScheduleError`` for an impossible stack."""
        check_count(f"microbatches of stack {self}", self.microbatches, most=MOST_MICROBATCHES)
        check_count(f"seed of stack {self}", self.seed, least=0, most=MOST_SEED)
        for problem in self._problems():
            raise StackError(f"stack {self}: {problem}")
        check_count(f"ranks of stack {self}", self.ranks, most=MOST_PROCESSES)
        if self.has_pipeline:
            for count in {self.each, -(-self.microbatches // self.replicas)}:
                build(self.schedule, ranks=self.sizes[PIPELINE], microbatches=count, virtual=self.virtual)

    def _problems(self) -> Iterator[str]:
        """Yield problems, each with a cure."""
        levels = {level: [name for name in self.parts if primitive_of(name).level is level] for level in Level}
        cut = [name for name in levels[Level.INSIDE] if {"tp", "sp"} & {*primitive_of(name).axes}]
        for those in (cut, levels[Level.AROUND], levels[Level.OVER]):
            if len(those) > 1:
                yield f"{' and '.join(those)} do the same work: leave one out"
        if {"cp", "ep"} <= self.sizes.keys():
            yield (
                "an expert's capacity and the auxiliary loss count the tokens of a rank, so with cp and ep together "
                "another model is trained than on one device: leave one out"
            )
        if "zero-1" in self.parts and {"tp", "sp"} & self.sizes.keys():
            yield "torch's ZeroRedundancyOptimizer takes no DTensors, which tp and sp make: use zero-2"
        for axis, whole, what in _CUTS:
            if whole % self.sizes.get(axis, 1):
                yield f"{axis} {self.sizes[axis]} does not divide {what}: use a divisor"
        if SEQUENCE % (pieces := 2 * self.sizes.get("cp", 1)) and "cp" in self.sizes:
            yield f"2 * cp {pieces} does not divide sequence {SEQUENCE}: each rank takes two pieces; use a divisor"
        shared = f"{self.microbatches} microbatches for {self.replicas} replicas"
        together = any(primitive_of(name).name not in _APART for name in levels[Level.OVER]) or self.has_experts
        if self.microbatches % self.replicas and together:
            yield f"{shared}, which all work on one at a time: use a multiple"
        if self.microbatches < self.replicas:
            yield f"{shared}: give each at least one"

    @property
    def layers(self) -> int:
        """Number of layers in the decoder, with embedding and head: two per stage, at least four."""
        return 2 * max(2, self.sizes.get(PIPELINE, 1) * self.virtual)

    @property
    def has_pipeline(self) -> bool:
        """True if several ranks have stages."""
        return PIPELINE in self.sizes

    @property
    def has_experts(self) -> bool:
        """True if the decoder has experts."""
        return "ep" in self.sizes

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def replicas(self) -> int:
        """Number of ranks with separate microbatches, for each stage."""
        return self.ranks // math.prod(self.sizes.get(axis, 1) for axis in (PIPELINE, "tp", "sp", "cp"))

    @property
    def each(self) -> int:
        """Number of microbatches in a replica; in the last, if unequal."""
        return self.microbatches // self.replicas

    def __str__(self) -> str:
        named = {axes[0]: (name, axes) for name in self.parts if (axes := primitive_of(name).axes)}
        items = [PIPELINE if axis == PIPELINE else named[axis][0] for axis in self.sizes if axis in (PIPELINE, *named)]
        said = [f"{name}={'x'.join(str(self.sizes[axis]) for axis in primitive_of(name).axes)}" for name in items]
        return ",".join([*said, *(name for name in self.parts if not primitive_of(name).axes)]) or ONE_DEVICE

    @property
    def replay(self) -> str:
        """Command line that repeats the run."""
        looped = f" --virtual {self.virtual}" if self.has_pipeline and self.virtual != _virtual(self.schedule) else ""
        schedule = f" --schedule {self.schedule}{looped}" if self.has_pipeline else ""
        return f"pipeproof validate --stack {self}{schedule} --microbatches {self.microbatches} --seed {self.seed}"


def _virtual(schedule: str) -> int:
    """Return the default number of stages on a rank."""
    return virtuals(canonical_name(schedule), looped=2)


def smallest_stack(name: str) -> str:
    """The line of the primitive ``name`` on the smallest mesh. Raises ``StackError`` for an unknown one."""
    known = find_primitive(name)
    sizes = "x".join([str(EACH)] * len(primitive_of(known).axes))
    return f"{known}={sizes}" if sizes else known


def _item(text: str, line: str) -> tuple[str, dict[str, int]]:
    """Parse a primitive and the sizes of its axes."""
    said, equals, size = text.partition("=")
    name = find_primitive(said.strip(), inside=line)
    axes = primitive_of(name).axes
    if not axes and equals:
        raise StackError(f"stack {line!r} says {text}: {name} has no ranks of its own; leave out {equals}{size}")
    wanted = "x".join([str(EACH)] * len(axes))
    if axes and not re.fullmatch(rf"\d+(x\d+){{{len(axes) - 1}}}", size.strip()):
        raise StackError(
            f"stack {line!r} says {text!r}: expected the ranks along {' and '.join(axes)}, e.g. {said}={wanted}"
        )
    own = [check_count(f"{name} in stack {line!r}", int(one), most=MOST_PROCESSES) for one in size.split("x") if axes]
    return name, dict(zip(axes, own, strict=True))


def find_primitive(text: str, *, inside: str = "", among: Iterable[str] = (*PRIMITIVES, *VARIANTS)) -> str:
    """Find the name in ``text`` ``among`` these. Raises ``StackError`` if unknown."""
    plain, known = ALIASES.get(text.lower(), text.lower()), list(among)
    if plain in known:
        return plain
    where = f" in stack {inside!r}" if inside else ""
    raise StackError(f"unknown primitive {text!r}{where}: {list_known(text, [*known, *ALIASES])}")
