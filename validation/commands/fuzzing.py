"""Fuzz campaigns: what the command ``fuzz`` does, and the file from which the next call of a long one goes on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st

from pipeproof.commands.campaign import NOTHING, Setting, composed_verdict, enough_ranks, replacing
from pipeproof.commands.ending import NO_VERDICT
from pipeproof.commands.selection import COMPOSED
from pipeproof.core.verdict import Verdict
from pipeproof.own.campaign_file import Progress
from pipeproof.own.case import Case
from pipeproof.own.findings import FINDINGS, Finding, is_known
from pipeproof.own.fuzz import Deciding, SmallestFailure, Tally, cases, fuzz, judge_case
from pipeproof.own.runtimes import OWN
from pipeproof.own.validator import narrow, validate
from pipeproof.pipeline.sizes import some
from pipeproof.reports.page.page import CampaignRow, campaign
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.rank_report import RankFailed
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
    decisions: Deciding | None = None

    def describe(self, setting: Setting, on: str) -> dict[str, Any]:
        """What of it and of ``setting`` says which cases are drawn and what they run on, ``on`` some versions."""
        decided = "real ranks" if setting.simulation is None else str(self.decisions or setting.simulation)
        return {
            "seed": self.seed,
            "schedules": [*self.schedules],
            "dtypes": [*self.dtypes],
            "max_ranks": self.max_ranks,
            "runtime": self.runtime,
            "device": setting.device,
            "decided": decided,
            "on": on,
            **({"check": COMPOSED} if setting.composed else {}),
        }


@dataclass(frozen=True)
class Drawn:
    """What a campaign draws, and what it leaves out where it is there. ``on``: whose versions these are found on.

    ``deciding``: what decides each case on simulated ranks, where that is drawn too. ``composed``: each step is held
    against itself, link by link.
    """

    strategy: st.SearchStrategy[Case]
    findings: Sequence[Finding]
    on: str
    deciding: Deciding | None
    composed: bool = False

    def judge(self, case: Case, world: World) -> Verdict:
        """The verdict on one case."""
        return judge_case(case, world, validated=composed_verdict) if self.composed else judge_case(case, world)


def fuzz_all(setting: Setting, wish: Wish, *, resume: str | None = None) -> int:
    """Run a fuzz campaign with progress; a failure is shrunk, shown and given a line to replay it by.

    On a runtime that is not ours, findings that are known and still there are said first, and not drawn. ``resume``:
    the file that says how far it has come.
    """
    runtime, on = wish.runtime, f"torch {torch.__version__}"
    progress = Progress.of(resume, wish.describe(setting, on))
    of_ours = cases(
        schedules=wish.schedules,
        dtypes=wish.dtypes,
        max_ranks=wish.max_ranks,
        device=setting.chosen_device,
        runtime=runtime,
    )
    findings = FINDINGS if runtime != OWN else ()
    drawn, tally = Drawn(of_ours, findings, on, wish.decisions, setting.composed), Tally(wish.cases)
    terminal = Terminal()
    with setting.outputs.open("fuzz") as files, setting.world() as world:
        there: list[Finding] = []
        found: SmallestFailure | None = None
        progress.resume(tally)
        with files.asked, terminal.progress("starting ranks") as show, enough_ranks():
            there += _findings(drawn, world, terminal)
            found = _run(drawn, there, world, tally, progress, show)
            found = found if drawn.composed else _explain_smallest(found, world)
        found = found or tally.smallest
        shown = found or next(iter(tally.undecided), None)
        terminal.say(f"seed {wish.seed}, {tally}\n{tally.by_schedule}{tally.by_replicas}")
        for line in filter(None, (tally.by_decision, world.searched)):
            terminal.say(line)
        verdicts = [world.complete(_verdict_of(shown))] if shown else []
        if found is not None:
            terminal.say("a case that is no pass, as small as shrinking made it:")
            if not found.repeated:
                terminal.say("it did not fail again when run a second time: a race, or something else without a seed")
        elif shown:
            terminal.say(f"rounding is too coarse to decide {some(len(tally.undecided), 'case')}, such as:")
        elif left := progress.undecided:
            terminal.say(f"rounding was too coarse to decide {some(len(left), 'case')}, such as:\n{left[0]}")
        for verdict in verdicts:
            terminal.verdict(verdict)
        status = verdicts[0].exit_status if verdicts else NO_VERDICT if progress.undecided else 0
        page, names = partial(_page, tally, found, wish.seed), [finding.name for finding in there]
        counts = {name: dict(getattr(tally, name)) for name in ("tiers", "schedules", "dtypes")}
        data = {"cases": tally.cases, "outcomes": dict(tally.verdicts), **counts}
        return files.finish(status, verdicts, page=page, seed=wish.seed, findings=names, tally=data)


def _run(
    drawn: Drawn,
    there: Sequence[Finding],
    world: World,
    tally: Tally,
    progress: Progress,
    show: Callable[[str], None],
) -> SmallestFailure | None:
    """Run all parts, up to the first with a case that is no pass: that part is not kept, so that it runs again."""
    strategy = drawn.strategy.filter(lambda case: not is_known(case, there))
    for count, seed in progress.remaining_parts(tally.budget):
        own = Tally(count)
        try:
            found = fuzz(
                world,
                own,
                seed_=seed,
                strategy=strategy,
                progress=lambda own=own: show(f"{tally.cases + own.cases} of {tally.budget}: {own}"),  # type: ignore[misc]
                run=drawn.judge,
                deciding=drawn.deciding,
            )
        finally:
            tally.add(own)
        if found is not None:
            return found
        progress.keep(tally, [_verdict_of(one).replay for one in own.undecided])
    return None


def _verdict_of(shown: SmallestFailure) -> Verdict:
    """The verdict on what is shown, with the line that replays it."""
    return replacing(shown.ending, shown.decision, seconds=shown.ending.seconds)


def _page(tally: Tally, found: SmallestFailure | None, seed: int) -> str:
    """All cases, what was found at their head: those that shrinking tried, and that were wrong too, are left out."""
    entries = [CampaignRow(one, one.outcome) for one in tally.each if found is None or one.outcome == "pass"]
    if found is not None:
        entries.insert(0, CampaignRow(found.ending, found.ending.outcome, "as small as shrinking made it"))
    return campaign(entries, said=f"fuzz, seed {seed}, {tally}", left_out=NOTHING)


def _explain_smallest(found: SmallestFailure | None, world: World) -> SmallestFailure | None:
    """What was found, with its cause: only the smallest case is worth the second run that this takes."""
    if found is None or found.verdict is None or not found.repeated:
        return found
    if found.decision is not None:
        world.decide(found.decision)
        narrow(found.case, world)
        found = replace(found, decision=world.decision)
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
