"""Fuzz campaigns: what the command ``fuzz`` does, and the file from which the next call of a long one goes on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pipeproof.commands.campaign import NOTHING, Setting, composed_verdict
from pipeproof.commands.ending import NO_VERDICT
from pipeproof.commands.selection import COMPOSED
from pipeproof.own.case import CaseError
from pipeproof.own.findings import FINDINGS, Finding, is_known
from pipeproof.own.fuzz import Deciding, SmallestFailure, Tally, cases, fuzz, judge_case
from pipeproof.own.runtimes import OWN
from pipeproof.own.validator import decided_by, narrow, run_to_end
from pipeproof.pipeline.files import read_json
from pipeproof.pipeline.sizes import some
from pipeproof.reports.gate_reports import CaseResult
from pipeproof.reports.page.page import campaign
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.output_file import OutputFile
from pipeproof.worlds.world import World

PART = 500  # cases that are drawn together: what an interruption loses at most
_WRITTEN = "pipeproof fuzz --resume"


@dataclass(frozen=True)
class Wish:
    """What a campaign is asked for: so many cases, of these schedules, types and ranks, drawn from a seed.

    ``decisions``: what decides each case on simulated ranks is drawn with it.
    """

    cases: int
    seed: int
    schedules: Sequence[str]
    dtypes: Sequence[str]
    max_ranks: int
    runtime: str = OWN
    decisions: Deciding | None = None

    def describe(self, setting: Setting, on: str) -> dict[str, Any]:
        """What of it and of ``setting`` says which cases are drawn and what they run on, ``on`` some versions."""
        decided = "real ranks" if setting.simulation is None else str(self.decisions or setting.simulation)
        drawn = {**vars(self), "schedules": [*self.schedules], "dtypes": [*self.dtypes]}
        del drawn["cases"], drawn["decisions"]
        more = {"check": COMPOSED} if setting.composed else {}
        return {**drawn, "device": setting.device, "decided": decided, "on": on, **more}


class Progress:
    """Parts of a campaign that have passed, and what they counted; kept in the file at ``path``, if there is one.

    ``asked`` is what decides what is drawn. In ``kept``, ``undecided`` are lines that replay the cases which rounding
    left open, and ``seconds`` is what it all took. ``tally``: how the campaign stands, with ``budget`` cases in the
    end. Raises ``ValueError`` for a file of another campaign, or of none.
    """

    def __init__(self, path: str | None, asked: Mapping[str, Any], budget: int) -> None:
        self.path, self.tally = path, Tally(budget)
        self.kept: dict[str, Any] = {"file": _WRITTEN, "asked": asked, "parts": 0, "seconds": 0.0}
        self.kept |= {"counts": {}, "undecided": []}
        if path is None or not Path(path).exists():
            return
        self.kept = read_json(path, expected=f"a campaign's file, which {_WRITTEN} wrote, or a new name")
        if self.kept.get("file") != _WRITTEN:
            raise CaseError(f"--resume {path} is no campaign's file: it was not written by {_WRITTEN}; name a new file")
        for name, value in asked.items():
            if (there := self.kept["asked"].get(name)) != value:
                words = [",".join(map(str, one)) if isinstance(one, list) else str(one) for one in (there, value)]
                raise CaseError(
                    f"--resume {path} is of a campaign with {name} {words[0]}, and this one has {words[1]}: give what "
                    "it has, or name a new file"
                )
        self.tally.began -= self.kept["seconds"]
        for name, counter in self.tally.counts.items():
            counter.update(self.kept["counts"].get(name, {}))

    def remaining_parts(self) -> Iterator[tuple[int, int]]:
        """The parts that are still to run: how many cases, from which seed. Each that was run to its end is kept."""
        seed = self.kept["asked"]["seed"]
        if self.path is None:
            yield self.tally.budget, seed
            return
        while (done := sum(self.kept["counts"].get("verdicts", {}).values())) < self.tally.budget:
            known = len(self.tally.undecided)
            # Who stops after this, for a failure or as it was asked to, leaves the part unkept: it runs again.
            yield min(PART, self.tally.budget - done), seed + (self.kept["parts"] << 32)
            self.kept |= {
                "parts": self.kept["parts"] + 1,
                "counts": {name: dict(counter) for name, counter in self.tally.counts.items()},
                "undecided": self.kept["undecided"] + [one.verdict.replay for one in self.tally.undecided[known:]],
                "seconds": perf_counter() - self.tally.began,
            }
            with OutputFile(self.path) as file:
                file.write_json(self.kept)


def fuzz_all(setting: Setting, wish: Wish, *, resume: str | None = None) -> int:
    """Run a fuzz campaign with progress; a failure is shrunk, shown and given a line to replay it by.

    On a runtime that is not ours, findings that are known and still there are said first, and not drawn. ``resume``:
    the file that says how far it has come.
    """
    on, terminal = f"torch {torch.__version__}", Terminal()
    progress = Progress(resume, wish.describe(setting, on), wish.cases)
    tally, there, found = progress.tally, list[Finding](), None
    judge = partial(judge_case, validated=composed_verdict) if setting.composed else judge_case
    with setting.world() as world:
        with setting.outputs.asked, terminal.progress("starting ranks") as show:
            if wish.runtime != OWN:
                there += _findings(world, terminal, on)
            kinds: dict[str, Any] = {"schedules": wish.schedules, "dtypes": wish.dtypes, "max_ranks": wish.max_ranks}
            drawn = cases(**kinds, device=world.device, runtime=wish.runtime)
            drawn = drawn.filter(lambda case: not is_known(case, there))
            run = partial(fuzz, world, tally, strategy=drawn, run=judge, deciding=wish.decisions)
            for part, seed in progress.remaining_parts():
                tally.part = part
                found = run(seed_=seed, progress=lambda: show(f"{tally.cases} of {tally.budget}: {tally}"))
                if found is not None:
                    break
            found = found if setting.composed else _explain_smallest(found, world)
        found = found or tally.smallest
        shown = found or next(iter(tally.undecided), None)
        terminal.say(f"seed {wish.seed}, {tally}\n{tally.details}")
        if world.searched:
            terminal.say(world.searched)
        verdicts = [world.complete(shown.verdict)] if shown else []
        if found is not None:
            terminal.say("a case that is no pass, as small as shrinking made it:")
            if not found.repeated:
                terminal.say("it did not fail again when run a second time: a race, or something else without a seed")
        elif shown:
            terminal.say(f"rounding is too coarse to decide {some(len(tally.undecided), 'case')}, such as:")
        elif left := progress.kept["undecided"]:
            terminal.say(f"rounding was too coarse to decide {some(len(left), 'case')}, such as:\n{left[0]}")
        for verdict in verdicts:
            terminal.verdict(verdict)
        status = verdicts[0].exit_status if verdicts else NO_VERDICT if progress.kept["undecided"] else 0
        counts = {name: dict(tally.counts[name]) for name in ("tiers", "schedules", "dtypes")}
        data = {"cases": tally.cases, "outcomes": dict(tally.counts["verdicts"]), **counts}
        # What was found is at the head; what shrinking tried, and was wrong too, is left out.
        rows = [CaseResult(one) for one in tally.each if found is None or one.outcome == "pass"]
        head = [] if found is None else [CaseResult(found.verdict, "as small as shrinking made it")]
        page = partial(campaign, [*head, *rows], said=f"fuzz, seed {wish.seed}, {tally}", left_out=NOTHING)
        names = [finding.name for finding in there]
        return setting.outputs.finish(status, verdicts, page=page, seed=wish.seed, findings=names, tally=data)


def _findings(world: World, terminal: Terminal, on: str) -> Iterator[Finding]:
    """Run the smallest case of every finding; those that are there on these versions."""
    terminal.say(f"findings on {on}; what is there is left out of what is drawn:")
    for finding in FINDINGS:
        with terminal.progress(finding.name):
            verdict = finding.verdict(world)
        terminal.say(f"  {finding.name:<26} {'absent' if verdict == 'pass' else verdict:<8} {finding.line}")
        if verdict != "pass":
            yield finding


def _explain_smallest(found: SmallestFailure | None, world: World) -> SmallestFailure | None:
    """What was found, with its cause: only the smallest case is worth the second run that this takes."""
    if found is None or found.verdict.failure or not found.repeated:
        return found
    if (decision := found.decision) is not None:
        world.decide(decision)
        narrow(found.case, world)
        decision = world.decision
    return replace(found, decision=decision, verdict=decided_by(run_to_end(found.case, world)[0], decision))
