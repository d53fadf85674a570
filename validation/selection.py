"""Which schedules a command line asks for: families by name, files, or all families that can be."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeline.files import is_csv
from pipeline.lower import Program
from pipeline.schedule import Schedule, ScheduleError
from pipeline.schedules import FAMILIES, LOOPED, build, canonical_name, virtuals
from validation.case import CaseError
from validation.own_schedule import own_schedule


@dataclass(frozen=True)
class Shape:
    """What families are built for; ``virtual`` None is each one's own number of stages per rank, 2 for a loop."""

    ranks: int
    microbatches: int
    virtual: int | None = None

    def family(self, name: str) -> Schedule:
        """The schedule ``name`` of this shape. Raises ``ScheduleError`` where it cannot be."""
        family = canonical_name(name)
        own = virtuals(family, looped=1 if family == "zb-h1" else 2)
        virtual = own if self.virtual is None else self.virtual
        return build(family, ranks=self.ranks, microbatches=self.microbatches, virtual=virtual)


@dataclass(frozen=True)
class Selection:
    """Schedules and programs by name (a file's is its path), and why others are left out."""

    chosen: Mapping[str, Schedule | Program]
    left_out: Mapping[str, str]


def selected(text: str, shape: Shape, *, fits: Callable[[Schedule], object]) -> Selection:
    """``all``, or names and files with commas between.

    ``fits`` raises ``ScheduleError`` for a schedule that cannot be run. What was asked for by name raises it too; of
    ``all``, families that cannot be are left out, unless that leaves nothing; ``virtual`` is for those that can have
    it.
    """
    if text.strip().lower() != "all":
        return Selection({name: _named(name.strip(), shape, fits) for name in text.split(",")}, {})
    chosen: dict[str, Schedule | Program] = {}
    left_out: dict[str, str] = {}
    for name in FAMILIES:
        own = shape if name in LOOPED else Shape(shape.ranks, shape.microbatches)
        try:
            chosen[name] = _named(name, own, fits)
        except ScheduleError as error:
            left_out[name] = str(error)
    if not chosen:
        raise CaseError(_nothing(left_out))
    return Selection(chosen, left_out)


def _named(name: str, shape: Shape, fits: Callable[[Schedule], object]) -> Schedule | Program:
    found = own_schedule(name) if is_csv(name) else shape.family(name)
    fits(found.schedule if isinstance(found, Program) else found)
    return found


def _nothing(left_out: Mapping[str, str]) -> str:
    """Why no family can be: each reason once."""
    names = defaultdict(list)
    for name, reason in left_out.items():
        names[reason].append(name)
    if len(names) == 1:
        return next(iter(names))
    return "no schedule can be: " + "; ".join(f"{', '.join(group)}: {reason}" for reason, group in names.items())
