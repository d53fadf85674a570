"""Schedules by name, of the shape that is asked for: families, or files."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeproof.own.case import CaseError, most_stages, own_schedule
from pipeproof.pipeline.files import is_csv
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.schedules import FAMILIES, LOOPED, build, can_have, canonical_name, virtuals
from pipeproof.pipeline.sizes import MOST_LAYERS, MOST_RANKS, check_count

RANKS, MICROBATCHES = 4, 8


Fits = Callable[[int], object]


@dataclass(frozen=True)
class Shape:
    """What families are built for, as far as it is said.

    None is 4 ranks, 8 microbatches, and each family's own number of stages per rank, 2 for a loop.
    """

    ranks: int | None = None
    microbatches: int | None = None
    virtual: int | None = None

    def family(self, name: str, *, fits: Fits = lambda stages: None) -> Schedule:
        """The schedule ``name`` of this shape. Raises ``ScheduleError`` where it cannot be, or what ``fits`` raises.

        ``fits`` is asked before the schedule is built, which can take long.
        """
        family = canonical_name(name)
        own = virtuals(family, looped=1 if family == "zb-h1" else 2)
        virtual = check_count("virtual", own if self.virtual is None else self.virtual, most=MOST_LAYERS)
        can_have(family, virtual)
        ranks = check_count("ranks", RANKS if self.ranks is None else self.ranks, most=MOST_RANKS)
        fits(ranks * virtual)
        microbatches = MICROBATCHES if self.microbatches is None else self.microbatches
        return build(family, ranks=ranks, microbatches=microbatches, virtual=virtual)

    def agree(self, path: str, schedule: Schedule) -> None:
        """Raise ``CaseError`` where something else is said than what the file at ``path`` has."""
        for option, said, own in (
            ("ranks", self.ranks, schedule.n_ranks),
            ("microbatches", self.microbatches, schedule.microbatches),
            ("virtual", self.virtual, most_stages(schedule)),
        ):
            if said not in (None, own):
                raise CaseError(f"--{option} is {said}, but {path} has {own}: leave the option out")


def select_names(text: str, shape: Shape, *, fits: Fits) -> tuple[Mapping[str, Schedule | Program], Mapping[str, str]]:
    """``all``, or names and files with commas between: by name (a file's path), and why others are left out.

    ``fits`` raises ``ScheduleError`` for a number of stages that cannot be run. What was asked for by name raises it
    too; of ``all``, families that cannot be are left out, unless that leaves nothing; ``virtual`` is for those that can
    have it. A shape is for families: where all are files it may say nothing else than they do.
    """
    if text.strip().lower() != "all":
        names = [name.strip() for name in text.split(",")]
        found = {name: _find_schedule(name, shape, fits) for name in names}
        if all(map(is_csv, names)):
            for path, mine in found.items():
                shape.agree(path, schedule_in(mine))
        return found, {}
    chosen: dict[str, Schedule | Program] = {}
    left_out: dict[str, str] = {}
    for name in FAMILIES:
        own = shape if name in LOOPED else Shape(shape.ranks, shape.microbatches)
        try:
            chosen[name] = _find_schedule(name, own, fits)
        except ScheduleError as error:
            left_out[name] = str(error)
    if not chosen:
        groups = defaultdict[str, list[str]](list)
        for name, reason in left_out.items():
            groups[reason].append(name)
        each = "; ".join(f"{', '.join(group)}: {reason}" for reason, group in groups.items())
        raise CaseError(next(iter(groups)) if len(groups) == 1 else f"no schedule can be: {each}")
    return chosen, left_out


def _find_schedule(name: str, shape: Shape, fits: Fits) -> Schedule | Program:
    if not is_csv(name):
        return shape.family(name, fits=fits)
    found = own_schedule(name)
    fits(schedule_in(found).n_stages)
    return found


def schedule_in(found: Schedule | Program) -> Schedule:
    """What is computed, of a schedule or a program."""
    return found.schedule if isinstance(found, Program) else found
