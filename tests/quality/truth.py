"""The truth test: every sentence of every verdict is held against what is true of the run.

``python tests/quality/truth.py``, or ``ci/truth``, runs faults in five foreign runtimes, faults in surroundings such as
two streams or bf16 (mixtures), faults of parallelism around and inside a stage beside what is right there (axes), two
more runtimes, of pure functions (functional) and with works in flight (async), and running jobs of both (jobs). It runs
foreign runs and cases of our own that are right, and each specimen of the catalogue in its smallest case: watched or
recorded, from final gradients alone, and held against itself, link by link, where that can show it; so are faults of
stages that are cut inside among ranks (cut). That takes some minutes on two cores.
``--all`` runs the specimens on every schedule as well, which takes most of an hour. The table counts how the runs were
named and how many sentences were false; every false sentence is listed. The exit status is 1 where any sentence is
false, where a run that is right fails or raises, and where a fault is not caught; else 0.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from composed_reach import AS_TOLD, HANGS, OUT_OF_REACH, SEEN_AS
from truth_async import faults as async_faults
from truth_async import rights as async_rights
from truth_axes import axes
from truth_check import Checked, Counts, False_, Truth, check
from truth_cut import cuts
from truth_faults import COUNTS, FAULTS
from truth_functional import faults as functional_faults
from truth_functional import rights as functional_rights
from truth_jobs import jobs
from truth_mixtures import mixtures
from truth_rights import rights
from truth_specimens import counts_of, tried, truth_of, wanted

from pipeproof.cases.case import Case
from pipeproof.cases.judgement import judge
from pipeproof.cases.observe import observe
from pipeproof.cases.specimens import CONTROLS, SPECIMENS
from pipeproof.foreign import WhiteBox
from pipeproof.judging.verdict import Verdict
from pipeproof.pipeline.schedules import FAMILIES, LOOPED, virtuals
from pipeproof.records.composed_case import validate_composed
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.world import World

PARTS = (
    *("faults", "mixtures", "axes", "rights", "functional", "async", "jobs", "specimens", "composed", "cut", "cases"),
)
_COLUMNS = ("right", "elsewhere", "unknown", "wrong", "silent", "needless", "alarm", "raised")


@dataclass(frozen=True)
class Row:
    """One run and what became of it; ``checked`` is None where no verdict came, and ``raised`` says why."""

    part: str
    title: str
    watched: bool
    checked: Checked | None
    raised: str = ""

    @property
    def naming(self) -> str:
        return "raised" if self.checked is None else self.checked.naming

    @property
    def false(self) -> Sequence[False_]:
        if self.checked is None:
            return (False_("verdict", self.raised, "there is no verdict"),)
        return self.checked.false

    @property
    def missed(self) -> bool:
        """Whether it has a fault that was not caught."""
        return self.naming in ("right", "elsewhere", "unknown", "wrong") and not (self.checked and self.checked.caught)

    @property
    def sound(self) -> bool:
        """Whether nothing is false in it: a fault was caught, and what is right is not said to be wrong."""
        return not self.false and self.naming != "alarm" and not self.missed

    def __str__(self) -> str:
        named = self.checked.named if self.checked is not None else ""
        how = "watched" if self.watched else "final"
        return f"{self.part:<10} {how:<8} {self.naming:<10} {named:<20} {len(self.false):>2} false  {self.title}"


def rows(parts: Sequence[str], schedules: Sequence[str], only: Sequence[str], world: World) -> Iterator[Row]:
    """Every run of ``parts`` whose title has one of ``only`` in it.

    An empty schedule stands for each specimen's smallest case.
    """

    def chosen(title: str) -> bool:
        return not only or any(one in title for one in only)

    whitebox = WhiteBox(world)
    parts_of: Mapping[str, Iterable[Any]] = {
        **{"faults": FAULTS, "mixtures": mixtures(), "axes": axes(), "rights": rights(), "jobs": jobs()},
        "functional": (*functional_rights(), *functional_faults()),
        "async": (*async_rights(), *async_faults()),
    }
    for part, foreign in parts_of.items():
        for one in foreign if part in parts else ():
            for watched in getattr(one, "ways", (True, False)) if chosen(one.title) else ():
                verdict = partial(one.verdict, whitebox, watched=watched)
                yield row(part, one.title, watched, one.truth, verdict, getattr(one, "counts", COUNTS))
    for case in _cases() if "cases" in parts else ():
        if chosen(str(case)):
            yield row("cases", str(case), True, Truth(), lambda: judge(case, observe(case, world)))  # noqa: B023
    for schedule in schedules if "specimens" in parts else ():
        for case in wanted((), [schedule] if schedule else ()):
            yield from of_specimen(case, world) if chosen(str(case)) else ()
    for schedule in schedules if "composed" in parts else ():
        for case in wanted((), [schedule] if schedule else ()):
            if chosen(str(case)) and case.specimen not in {*OUT_OF_REACH, *HANGS}:
                yield of_links(case, world)
    for one in cuts() if "cut" in parts else ():
        if chosen(one.title):
            yield row("cut", one.title, True, one.truth, partial(one.verdict, world), one.counts)


def row(
    part: str, title: str, watched: bool, truth: Truth, verdict: Callable[[], Verdict], counts: Counts = COUNTS
) -> Row:
    """What became of one run."""
    try:
        found = verdict()
        if found.failure and not truth.kinds:
            return Row(part, title, watched, None, found.headline)
        return Row(part, title, watched, check(found, truth, counts, watched=watched))
    except Exception as error:  # whatever a run raises is what became of it
        return Row(part, title, watched, None, _first_line(error))


def _first_line(error: Exception) -> str:
    """What was raised, as far as a person wants to read it in a list."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"


def of_specimen(case: Case, world: World) -> Iterator[Row]:
    """Both diagnoses of a case with a specimen."""
    truth, counts = truth_of(SPECIMENS[case.specimen], case), counts_of(case)
    try:
        for one in tried(case, world):
            checked = check(one.verdict, truth, counts, watched=one.watched)
            yield Row("specimens", one.title, one.watched, checked)
    except Exception as error:  # whatever a run raises is what became of it
        yield Row("specimens", str(case), True, None, _first_line(error))


def of_links(case: Case, world: World) -> Row:
    """The verdict on a case with a specimen that is held against itself, link by link."""
    name, counts = case.specimen, counts_of(case)
    known = truth_of(SPECIMENS[name], case)
    known = replace(known, kinds=(*known.kinds, *([SEEN_AS[name]] if name in SEEN_AS else ())))
    known = replace(known, wrong=known.wrong - AS_TOLD.get(name, frozenset()))
    return row("composed", f"{case} --check composed", True, known, lambda: validate_composed(case, world), counts)


def _cases() -> Iterator[Case]:
    """Cases of our own that are right, and the catalogue's changes that are no faults."""
    models = ("gpt", "gpt-tied", "mlp", "dropout", "batchnorm", "frozen", "twice")
    more = ("", "ragged", "loss=tokens unequal", "dtype=bf16", "ragged", "dtype=fp64", "")
    for number, name in enumerate(FAMILIES):
        for turn in (0, 1):
            kind = (number + 3 * turn) % len(models)
            yield _case(name, models[kind], more[(number + turn) % len(more)])
    for name, control in CONTROLS.items():
        yield Case.parse(f"{control.smallest} specimen={name}")


def _case(schedule: str, model: str, more: str) -> Case:
    virtual = virtuals(schedule, looped=2 if schedule in LOOPED else 1)
    split = ",".join(["1"] * (2 * virtual))
    line = f"{schedule} r2 s{2 * virtual} m4 split={split} model={model} {more} plan=train+eval+train seed=0"
    return Case.parse(" ".join(line.split()))


def table(found: Sequence[Row]) -> str:
    """Counts by part, watched and not."""
    lines = [
        f"{'':<20}{'runs':>6}"
        + "".join(f"{name:>11}" for name in _COLUMNS)
        + f"{'missed':>8}{'false':>9}{'garbled':>9}"
    ]
    for key in dict.fromkeys((one.part, one.watched) for one in found):
        some = [one for one in found if (one.part, one.watched) == key]
        counts = Counter(one.naming for one in some)
        cells = "".join(f"{counts[name] or '.':>11}" for name in _COLUMNS)
        false, missed = sum(len(one.false) for one in some), sum(one.missed for one in some)
        garbled = sum(len(one.checked.garbled) for one in some if one.checked is not None)
        lines.append(
            f"{key[0]:<12}{'watched' if key[1] else 'final':<8}{len(some):>6}{cells}{missed:>8}{false:>9}{garbled:>9}"
        )
    return "\n".join(lines)


def worse(found: Sequence[Row]) -> list[str]:
    """Runs that more evidence named worse: wrong where they were watched, and right where they were not."""
    final = {one.title: one.naming for one in found if not one.watched}
    bad = ("wrong", "elsewhere", "alarm", "unknown")
    good = ("right", "silent")
    return [one.title for one in found if one.watched and one.naming in bad and final.get(one.title) in good]


def told(one: Row) -> Iterator[str]:
    """Every false sentence of a run."""
    for false in one.false:
        yield f"    {false.role:<8} {false.text}\n             FALSE: {false.why}"
    if one.missed:
        yield "    NOT CAUGHT"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, print the table and every false sentence; returns the exit status."""
    parser = argparse.ArgumentParser(prog="truth", description=__doc__)
    parser.add_argument("--all", action="store_true", help="specimens on every schedule, too")
    parser.add_argument("--part", default=",".join(PARTS), help=f"some of {','.join(PARTS)} (default: all)")
    parser.add_argument("--schedule", default="", help="specimens on these schedules, not in their smallest cases")
    parser.add_argument("--only", default="", help="runs whose titles have one of these texts, separated by commas")
    parser.add_argument("--json", help="write every run there")
    chosen = parser.parse_args(arguments)
    terminal, found = Terminal(), list[Row]()
    schedules = ["", *FAMILIES] if chosen.all else chosen.schedule.split(",")
    parts, only = chosen.part.split(","), [text for text in chosen.only.split(",") if text]
    for what, known in ((parts, PARTS), (schedules, ("", *FAMILIES))):
        if unknown := [name for name in what if name not in known]:
            parser.error(f"{', '.join(unknown)}: known are {', '.join(filter(None, known))}")
    with World(timeout_s=60.0, most_groups=100) as world:
        for one in rows(parts, schedules, only, world):
            found.append(one)
            terminal.say("\n".join([str(one), *told(one)]))
    terminal.say("\n" + table(found))
    if titles := worse(found):
        terminal.say("named worse where more was seen: " + "; ".join(titles))
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump([asdict(one) | {"false": [list(false) for false in one.false]} for one in found], file, indent=1)
    return 0 if found and all(one.sound for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
