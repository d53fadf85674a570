"""The truth test: every sentence of every verdict is held against what is true of the run.

``python tests/quality/truth.py``, or ``ci/truth``, runs faults in five foreign runtimes, faults in surroundings such as
two streams or bf16 (mixtures), faults of parallelism around and inside a stage beside what is right there (axes), two
more runtimes, of pure functions (functional) and with works in flight (async), and running jobs of both (jobs). It runs
foreign runs and cases of our own that are right, and each specimen of the catalogue in its smallest case: watched or
recorded, from final gradients alone, and held against itself, link by link, where that can show it; so are faults of
stages that are cut inside among ranks (cut), and cases of our own that are right (links). Steps in bf16 and fp16 have
the reference's kernels, or others (narrow); 6,000 cases are those that ``fuzz`` draws.
``--all`` runs the specimens on every schedule as well, which takes most of an hour. The table counts how the runs were
named and how many sentences were false; every false sentence is listed. The exit status is 1 where any sentence is
false, where a run that is right fails or raises, and where a fault is not caught; else 0.
``--against baseline`` prints what is otherwise than in ``baseline.jsonl``, and ends with 1 where it may not be so: a
fault that was caught passes, a right row fails, of our own runtime something is no longer known or bit for bit, or one
more sentence is false. ``--keep FILE`` takes rows that are there already from that file, and adds others to it: so a
campaign goes on where it was left, and ``--every N --first K`` deals it to several processes.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corpus
import truth_async
import truth_functional
from composed_reach import AS_TOLD, HANGS, OUT_OF_REACH, SEEN_AS
from corpus import Values
from truth_axes import axes
from truth_check import COUNTS, RIGHT, Checked, Counts, False_, Truth, check
from truth_cut import cuts
from truth_faults import FAULTS
from truth_jobs import jobs
from truth_mixtures import mixtures
from truth_narrow import narrow
from truth_rights import rights
from truth_specimens import counts_of, tried, truth_of, wanted

from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.own.fuzz import Tally, fuzz
from pipeproof.own.judgement import judge
from pipeproof.own.observe import observe
from pipeproof.pipeline.schedules import FAMILIES, LOOPED, virtuals
from pipeproof.reports.terminal import Terminal
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.composed import validate_composed
from pipeproof.wings.specimens import CONTROLS, SPECIMENS
from pipeproof.worlds.world import World

PARTS = (
    *("faults", "mixtures", "axes", "rights", "functional", "async", "jobs", "narrow", "specimens", "composed", "cut"),
    *("cases", "links", "fuzz"),
)
FUZZED = 6000
_COLUMNS = ("right", "elsewhere", "unknown", "wrong", "silent", "needless", "alarm", "raised")


@dataclass(frozen=True)
class Row:
    """What became of one run; ``checked`` is None where no verdict came, and the values say why."""

    values: Values
    checked: Checked | None = None

    @property
    def false(self) -> Sequence[False_]:
        if self.checked is None:
            return (False_("verdict", self.values.why, "there is no verdict"),)
        return self.checked.false

    @property
    def missed(self) -> bool:
        """Whether it has a fault that was not caught."""
        faulty = self.values.naming in ("right", "elsewhere", "unknown", "wrong")
        return faulty and not (self.checked and self.checked.caught)

    @property
    def sound(self) -> bool:
        """Whether nothing is false in it: a fault was caught, and what is right is not said to be wrong."""
        return not self.false and self.values.naming != "alarm" and not self.missed

    def __str__(self) -> str:
        part, how, title = self.values.row.split(" | ", 2)
        named = self.checked.named if self.checked is not None else ""
        return f"{part:<10} {how:<8} {self.values.naming:<10} {named:<20} {len(self.false):>2} false  {title}"


@dataclass(frozen=True)
class Try:
    """A run, which ``rows`` makes: one row for each way in which it is observed."""

    part: str
    title: str
    rows: Callable[[], Iterable[Row]]


def foreign() -> Mapping[str, Sequence[Any]]:
    """By part, every run that is not of our own runtime: a title, a truth, and a verdict."""
    return {
        **{"faults": FAULTS, "mixtures": [*mixtures()], "axes": [*axes()], "rights": [*rights()], "jobs": [*jobs()]},
        "functional": (*truth_functional.rights(), *truth_functional.faults()),
        "async": (*truth_async.rights(), *truth_async.faults()),
        "narrow": [*narrow()],
        "cut": [*cuts()],
    }


def tries(parts: Sequence[str], schedules: Sequence[str], world: World) -> Iterator[Try]:
    """Every run of ``parts``.

    An empty schedule stands for each specimen's smallest case.
    """
    whitebox = WhiteBox(world)
    for part, runs in foreign().items():
        for one in runs if part in parts else ():
            yield Try(part, one.title, partial(of_foreign, part, one, whitebox))
    for part, right in {"cases": cases, "links": cases, "fuzz": partial(drawn_cases, FUZZED)}.items():
        for case in right() if part in parts else ():
            yield Try(part, title_of(part, case), partial(of_right, part, case, world))
    for part, wrong in {"specimens": of_specimen, "composed": of_links}.items():
        planted = (case for schedule in schedules for case in wanted((), [schedule] if schedule else ()))
        for case in planted if part in parts else ():
            if part == "specimens" or case.specimen not in {*OUT_OF_REACH, *HANGS}:
                yield Try(part, title_of(part, case), partial(wrong, case, world))


def title_of(part: str, case: Case) -> str:
    """What a run of ``case`` is called."""
    return f"{case} --check composed" if part in ("links", "composed") else str(case)


def attempt(make: Callable[[], Any]) -> Any:
    """What ``make`` gives, or the exception that it raises: whatever a run raises is what became of it."""
    try:
        return make()
    except Exception as error:
        return error


def row(part: str, title: str, watched: bool, truth: Truth, found: Verdict | Exception, counts: Counts = COUNTS) -> Row:
    """What became of one run."""
    name, faulty = f"{part} | {'watched' if watched else 'final'} | {title}", bool(truth.kinds)
    if isinstance(found, Verdict) and (faulty or not found.failure):
        checked = attempt(partial(check, found, truth, counts, watched=watched))
        if isinstance(checked, Checked):
            return Row(Values.of(name, faulty=faulty, verdict=found, checked=checked), checked)
        found = checked
    first, _, _ = str(found).partition("\n")
    why = found.headline if isinstance(found, Verdict) else f"{type(found).__name__}: {first[:160]}"
    return Row(Values(name, faulty, "raised", "raised", why=why))


def of_foreign(part: str, one: Any, whitebox: WhiteBox) -> Iterator[Row]:
    """A foreign run, in each way that it is observed."""
    for watched in one.ways:
        found = attempt(partial(one.verdict, whitebox, watched=watched))
        yield row(part, one.title, watched, one.truth, found, one.counts)


def of_right(part: str, case: Case, world: World) -> Iterator[Row]:
    """A case of our own that is right: beside the reference, or held against itself, link by link."""
    composed = partial(validate_composed, case, world)
    found = attempt(composed if part == "links" else lambda: judge(case, observe(case, world)))
    yield row(part, title_of(part, case), True, RIGHT, found)


def of_specimen(case: Case, world: World) -> Iterator[Row]:
    """Both diagnoses of a case with a specimen."""
    known, verdicts = truth_of(SPECIMENS[case.specimen], case), tried(case, world)
    for watched in (True, False):
        if (found := attempt(partial(next, verdicts, None))) is not None:
            yield row("specimens", str(case), watched, known, found, counts_of(case))


def of_links(case: Case, world: World) -> Iterator[Row]:
    """The verdict on a case with a specimen that is held against itself, link by link."""
    name, known = case.specimen, truth_of(SPECIMENS[case.specimen], case)
    known = replace(known, kinds=(*known.kinds, *([SEEN_AS[name]] if name in SEEN_AS else ())))
    known = replace(known, wrong=known.wrong - AS_TOLD.get(name, frozenset()))
    found = attempt(partial(validate_composed, case, world))
    yield row("composed", title_of("composed", case), True, known, found, counts_of(case))


def drawn_cases(count: int) -> list[Case]:
    """As many cases as ``fuzz`` draws from seed 0, each once."""
    found, tally = dict[Case, None](), Tally(count)

    def noted(case: Case, world: Any) -> Verdict:
        found[case] = None
        return Verdict("", "pass", "bitwise", ())

    fuzz(SimpleNamespace(decision=None), tally, run=noted)  # type: ignore[arg-type]
    return [*found]


def cases() -> Iterator[Case]:
    """Cases of our own that are right, and the catalogue's changes that are no faults."""
    models = ("gpt", "gpt-tied", "mlp", "dropout", "batchnorm", "frozen", "twice")
    more = ("", "ragged", "loss=tokens unequal", "dtype=bf16", "ragged", "dtype=fp64", "")
    for number, name in enumerate(FAMILIES):
        stages = 2 * virtuals(name, looped=2 if name in LOOPED else 1)
        for turn in (0, 1):
            model, options = models[(number + 3 * turn) % len(models)], more[(number + turn) % len(more)]
            line = f"{name} r2 s{stages} m4 split={','.join(['1'] * stages)} model={model} {options}"
            yield Case.parse(" ".join(f"{line} plan=train+eval+train seed=0".split()))
    for name, control in CONTROLS.items():
        yield Case.parse(f"{control.smallest} specimen={name}")


def table(found: Sequence[Row]) -> str:
    """Counts by part, watched and not."""
    lines = [
        f"{'':<20}{'runs':>6}"
        + "".join(f"{name:>11}" for name in _COLUMNS)
        + f"{'missed':>8}{'false':>9}{'garbled':>9}"
    ]
    rows = [(tuple(one.values.row.split(" | ")[:2]), one) for one in found]
    for key in dict.fromkeys(key for key, _ in rows):
        some = [one for own, one in rows if own == key]
        counts = Counter(one.values.naming for one in some)
        cells = "".join(f"{counts[name] or '.':>11}" for name in _COLUMNS)
        false, missed = sum(len(one.false) for one in some), sum(one.missed for one in some)
        garbled = sum(len(one.checked.garbled) for one in some if one.checked is not None)
        lines.append(f"{key[0]:<12}{key[1]:<8}{len(some):>6}{cells}{missed:>8}{false:>9}{garbled:>9}")
    return "\n".join(lines)


def worse(found: Sequence[Row]) -> list[str]:
    """Runs that more evidence named worse: wrong where they were watched, and right where they were not."""
    final = {one.values.title: one.values.naming for one in found if not one.values.watched}
    bad, good = ("wrong", "elsewhere", "alarm", "unknown"), ("right", "silent")
    every = [one.values for one in found if one.values.watched and one.values.naming in bad]
    return [one.title for one in every if final.get(one.title) in good]


def compare(path: str, found: Mapping[str, Values], terminal: Terminal) -> int:
    """Print what is otherwise than in the file; 1 where some of it may not be."""
    before = corpus.read(corpus.BASELINE if path == "baseline" else Path(path))
    changes = list(corpus.transitions(before, found.values()))
    terminal.say("\n".join(map(str, sorted(changes, key=lambda one: (not one.forbidden, one.what)))))
    terminal.say(corpus.summary(changes, len(found.keys() & before.keys())))
    return 1 if any(one.forbidden for one in changes) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, print the table and every false sentence; returns the exit status."""
    parser = argparse.ArgumentParser(prog="truth", description=__doc__)
    parser.add_argument("--all", action="store_true", help="specimens on every schedule, too")
    parser.add_argument("--part", default=",".join(PARTS), help=f"some of {','.join(PARTS)} (default: all)")
    parser.add_argument("--schedule", default="", help="specimens on these schedules, not in their smallest cases")
    parser.add_argument("--only", default="", help="runs whose titles have one of these texts, separated by commas")
    parser.add_argument("--json", help="write every run there")
    parser.add_argument("--keep", type=Path, help="a file of rows: those that it has are not run again, others added")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one run in N alone")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="with --every: the one to begin with")
    parser.add_argument("--against", metavar="FILE", help="print what changed since FILE or baseline")
    chosen = parser.parse_args(arguments)
    terminal = Terminal()
    schedules = ["", *FAMILIES] if chosen.all else chosen.schedule.split(",")
    parts, only = chosen.part.split(","), [text for text in chosen.only.split(",") if text]
    for what, known in ((parts, PARTS), (schedules, ("", *FAMILIES))):
        if unknown := [name for name in what if name not in known]:
            parser.error(f"{', '.join(unknown)}: known are {', '.join(filter(None, known))}")
    kept = {} if chosen.keep is None else corpus.read(chosen.keep)
    done = {(one.part, one.title) for one in kept.values()}
    found = list[Row]()
    with World(timeout_s=60.0, most_groups=100) as world:
        every = [one for one in tries(parts, schedules, world) if not only or any(text in one.title for text in only)]
        for run in (run for run in every[chosen.first :: chosen.every] if (run.part, run.title) not in done):
            for one in run.rows():
                found.append(one)
                false = [f"    {said.role:<8} {said.text}\n             FALSE: {said.why}" for said in one.false]
                terminal.say("\n".join([str(one), *false, *(["    NOT CAUGHT"] if one.missed else [])]))
                if chosen.keep is not None:
                    with chosen.keep.open("a") as file:
                        file.write(one.values.line() + "\n")
    terminal.say("\n" + table(found))
    if titles := worse(found):
        terminal.say("named worse where more was observed: " + "; ".join(titles))
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump([asdict(one) | {"false": [list(false) for false in one.false]} for one in found], file, indent=1)
    if chosen.against is not None:
        return compare(chosen.against, kept | {one.values.row: one.values for one in found}, terminal)
    return 0 if found and all(one.sound for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
