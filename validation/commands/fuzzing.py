"""Fuzz campaigns and showing how they go: what the command ``fuzz`` does."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from hypothesis import strategies as st

from pipeproof.cases.case import Case
from pipeproof.cases.decisions import Decisions
from pipeproof.cases.findings import FINDINGS, Finding, known
from pipeproof.cases.fuzz import Deciding, SmallestFailure, Tally, cases, fuzz, judged
from pipeproof.cases.interleavings import narrow
from pipeproof.cases.runtimes import OWN
from pipeproof.cases.validator import validate
from pipeproof.commands.campaign import NOTHING, Setting, composed_verdict, enough_ranks, replacing
from pipeproof.commands.campaign_file import CampaignFile, DrawnCases
from pipeproof.commands.ending import NO_VERDICT
from pipeproof.core.verdict import Verdict
from pipeproof.foreign.elsewhere import told_of_transports
from pipeproof.pipeline.sizes import some
from pipeproof.reports.page.page import CampaignRow, campaign
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.simulated.exploration import told
from pipeproof.worlds.world import World


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
    decisions: Decisions | None = None

    def told(self, setting: Setting, on: str) -> dict[str, Any]:
        """What of it and of ``setting`` says which cases are drawn and what they run on, ``on`` some versions."""
        drawn = {"seed": self.seed, "schedules": [*self.schedules], "dtypes": [*self.dtypes]}
        decided = "real ranks" if setting.simulation is None else str(self.decisions or setting.simulation)
        device = {"device": setting.device, "decided": decided, "on": on}
        device |= {"check": "composed"} if setting.composed else {}
        return drawn | {"max_ranks": self.max_ranks, "runtime": self.runtime} | device


def fuzz_all(setting: Setting, wish: Wish, *, resume: str | None = None) -> int:
    """Run a fuzz campaign with progress; a failure is shrunk, shown and given a line to replay it by.

    On a runtime that is not ours, findings that are known and still there are said first, and not drawn. ``resume``:
    the file that says how far it has come.
    """
    runtime, on = wish.runtime, f"torch {torch.__version__}"
    file = None if resume is None else CampaignFile.opened(resume, wish.told(setting, on))
    parts = Parts(wish.seed, file, setting.composed)
    of_ours = cases(
        schedules=wish.schedules,
        dtypes=wish.dtypes,
        max_ranks=wish.max_ranks,
        device=setting.chosen_device,
        runtime=runtime,
    )
    findings = FINDINGS if runtime != OWN else ()
    return _campaign(setting, Drawn(of_ours, findings, on, wish.decisions), Tally(wish.cases), parts)


@dataclass(frozen=True)
class Drawn:
    """What a campaign draws, and what it leaves out where it is there. ``on``: whose versions these are found on.

    ``deciding``: what decides each case on simulated ranks, where that is drawn too.
    """

    strategy: st.SearchStrategy[Case]
    findings: Sequence[Finding]
    on: str
    deciding: Deciding | None

    def without(self, there: Sequence[Finding]) -> st.SearchStrategy[Case]:
        """The cases that none of these findings is in."""
        return self.strategy.filter(lambda case: not known(case, there))


@dataclass(frozen=True)
class Parts:
    """What a campaign runs of what it draws: all at once, or parts, of which a file says which have run.

    ``composed``: each step is held against itself, link by link.
    """

    seed: int
    file: CampaignFile | None
    composed: bool = False

    def judged(self, case: Case, world: World) -> Verdict:
        """The verdict on one case."""
        return judged(case, world, validated=composed_verdict) if self.composed else judged(case, world)

    def left(self, budget: int) -> Iterator[DrawnCases]:
        """The parts that are to run."""
        return iter([DrawnCases(self.seed, budget)]) if self.file is None else self.file.left(budget)


def _campaign(setting: Setting, drawn: Drawn, tally: Tally, parts: Parts) -> int:
    terminal, file = Terminal(), parts.file
    with setting.outputs.opened("fuzz") as files, setting.world() as world:
        there: list[Finding] = []
        found: SmallestFailure | None = None
        if file is not None:
            file.resumed(tally)
        with files.asked, terminal.progress("starting ranks") as show, enough_ranks():
            there += _findings(drawn, world, terminal)
            found = _run(drawn, there, world, tally, parts, show)
            found = found if parts.composed else _explained(found, world)
        found = found or tally.smallest
        left = None if found else next(iter(tally.undecided), None)
        terminal.say(f"seed {parts.seed}, {tally}\n{tally.by_schedule}{tally.by_replicas}")
        for line in (tally.by_decision, told(world.explorations)):
            terminal.say(line) if line else None
        shown = found or left
        verdicts = [told_of_transports(_told_of(shown), world)] if shown else []
        if found is not None:
            terminal.say("a case that is no pass, as small as shrinking made it:")
            if not found.repeated:
                terminal.say("it did not fail again when run a second time: a race, or something else without a seed")
        if left is not None:
            terminal.say(f"rounding is too coarse to decide {some(len(tally.undecided), 'case')}, such as:")
        for verdict in verdicts:
            terminal.say(verdict.details if terminal.manner.verbose else str(verdict), verdict.word)
        status, findings = verdicts[0].exit_status if verdicts else 0, [finding.name for finding in there]
        if file is not None and file.open and not verdicts:
            terminal.say(file.open)
            status = NO_VERDICT
        page = partial(_page, tally, found, parts.seed)
        return files.finish(status, verdicts, page=page, seed=parts.seed, findings=findings, tally=_data(tally))


def _run(
    drawn: Drawn,
    there: Sequence[Finding],
    world: World,
    tally: Tally,
    parts: Parts,
    show: Callable[[str], None],
) -> SmallestFailure | None:
    """Run all parts, up to the first with a case that is no pass: that part is not kept, so that it runs again."""
    for part in parts.left(tally.budget):
        own = Tally(part.cases)
        try:
            found = fuzz(
                world,
                own,
                seed_=part.seed,
                strategy=drawn.without(there),
                progress=partial(_show, show, own, tally),
                run=parts.judged,
                deciding=drawn.deciding,
            )
        finally:
            tally.add(own)
        if found is not None:
            return found
        if parts.file is not None:
            undecided = [_told_of(one).replay for one in own.undecided]
            parts.file.keep(tally, undecided, seconds=perf_counter() - tally.began)
    return None


def _show(show: Callable[[str], None], own: Tally, tally: Tally) -> None:
    show(f"{tally.cases + own.cases} of {tally.budget}: {own}")


def _told_of(shown: SmallestFailure) -> Verdict:
    """The verdict on what is shown, with the line that replays it."""
    return replacing(shown.ending, shown.simulation, seconds=shown.ending.seconds)


def _page(tally: Tally, found: SmallestFailure | None, seed: int) -> str:
    """All cases, what was found at their head: those that shrinking tried, and that were wrong too, are left out."""
    entries = [CampaignRow(one, one.verdict) for one in tally.each if found is None or one.verdict == "pass"]
    if found is not None:
        entries.insert(0, CampaignRow(found.ending, found.ending.verdict, "as small as shrinking made it"))
    return campaign(entries, said=f"fuzz, seed {seed}, {tally}", left_out=NOTHING)


def _explained(found: SmallestFailure | None, world: World) -> SmallestFailure | None:
    """What was found, with its cause: only the smallest case is worth the second run that this takes."""
    if found is None or found.verdict is None or not found.repeated:
        return found
    if found.simulation is not None:
        world.decide(found.simulation)
        narrow(found.case, world)
        found = replace(found, simulation=world.simulation)
    try:
        return replace(found, verdict=validate(found.case, world))
    except RankFailed as failure:
        return replace(found, verdict=None, failure=failure)


def _findings(drawn: Drawn, world: World, terminal: Terminal) -> list[Finding]:
    """Run the smallest case of every finding; those that are there on these versions."""
    there: list[Finding] = []
    if drawn.findings:
        terminal.say(f"findings on {drawn.on}; what is there is left out of what is drawn:")
    for finding in drawn.findings:
        with terminal.progress(finding.name), enough_ranks():
            verdict = finding.verdict(world)
        terminal.say(f"  {finding.name:<26} {'absent' if verdict == 'pass' else verdict:<8} {finding.line}")
        if verdict != "pass":
            there.append(finding)
    return there


def _data(tally: Tally) -> dict[str, object]:
    return {
        "cases": tally.cases,
        "outcomes": dict(tally.verdicts),
        "tiers": dict(tally.tiers),
        "schedules": dict(tally.schedules),
        "dtypes": dict(tally.dtypes),
    }
