"""Running cases and showing how it goes: what the commands ``validate``, ``fuzz`` and ``replay`` do."""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch._dynamo  # noqa: F401  # the reference's optimizer wants it: better now, while the fork server imports it

from pipeproof.commands.ending import NO_VERDICT
from pipeproof.commands.option_parser import UsageError
from pipeproof.commands.outputs import Outputs
from pipeproof.commands.selection import COMPOSED, simulation_of
from pipeproof.core.observe.observed import Observed
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.own.faults import specimen
from pipeproof.own.validator import crash_verdict, decided_by, narrow, refusal, run_to_end
from pipeproof.records.case_record import record_observed
from pipeproof.records.record_file import write
from pipeproof.reports.columns import Column, header
from pipeproof.reports.gate_reports import CaseResult
from pipeproof.reports.page.page import campaign
from pipeproof.reports.table import COLUMNS, line, profile_table, summary
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds import accelerator
from pipeproof.worlds.accelerator import AUTO, CPU
from pipeproof.worlds.launcher import warn_of_crowd
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World

if TYPE_CHECKING:
    from pipeproof.wings.simulated import Simulation

_MOST_GROUPS = 100  # process groups that jobs may leave on a rank; to replace ranks takes seconds

NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Setting:
    """Where cases run, and what is said about them. ``device``: "auto", or a type of device.

    ``outputs`` are files for the verdicts, and for what the ranks of the one case gave. ``plugin``: the file that
    registers the specimen of the one case, which who replays it needs too. ``simulation``: None on real ranks.
    ``composed``: steps are held against themselves, link by link, and not against a reference.
    """

    device: str = AUTO
    timeout_s: float = 120.0
    outputs: Outputs = field(default_factory=Outputs)
    profile: bool = False
    explain: bool = False
    plugin: str | None = None
    simulation: "Simulation | None" = None
    composed: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace, *, device: str | None = None, explain: bool = False) -> "Setting":
        """What a command line asks for; ``device``: in place of its own."""
        said = vars(options)
        return cls(
            said["device"] if device is None else device,
            options.timeout,
            options.outputs,
            said.get("profile", False),
            explain,
            said.get("plugin"),
            simulation_of(options) if "world" in said else None,
            said.get("check") == COMPOSED,
        )

    def world(self) -> World:
        """The ranks. What they print is for who asks for more, or runs one case to look into it."""
        silent = not (self.explain or Terminal().manner.verbose)
        if (simulation := self.simulation) is not None:
            from pipeproof.wings.simulated import SimulatedWorld, Timing

            timing = Timing(measured=self.profile)
            world = SimulatedWorld(timeout_s=self.timeout_s, silent=silent, timing=timing)
            world.decide(simulation)
            return world
        return World(device=self.chosen_device, timeout_s=self.timeout_s, silent=silent, most_groups=_MOST_GROUPS)

    @property
    def chosen_device(self) -> str:
        """The type of device. Raises ``UsageError`` for one that is not here."""
        if self.simulation is not None and self.device in (AUTO, CPU):
            return CPU
        if self.simulation is not None:
            raise UsageError(f"--device {self.device} with --world simulated: simulated ranks compute on cpu alone")
        if self.device == AUTO:
            return accelerator.detect()
        if why := accelerator.absence(self.device):
            cure = f"use --device cpu, or torch built for {self.device} on a machine that has one"
            raise UsageError(f"--device {self.device}, but {why}: {cure}")
        return self.device


@dataclass(frozen=True)
class CaseRun:
    """One thing to validate.

    ``judge`` gives its verdict. ``row`` is the table's line of it, as wide as it may be. ``doubt``: why a pass says
    less than it seems; empty if it does not. ``keep``: what is left to do after its verdict is shown.
    """

    title: str
    ranks: int
    judge: Callable[[World], Verdict]
    row: Callable[[Verdict, int | None], str]
    doubt: Callable[[], str] = str
    keep: Callable[[], object] = bool


def validate_all(wanted: Sequence[Case], setting: Setting, *, left_out: Mapping[str, str] = NOTHING) -> int:
    """Validate each case, a line each and a screen for what is no pass; returns the exit status.

    ``left_out`` are schedules that were asked for and cannot be, with the reason; they are said and counted.
    """
    for case in wanted:
        specimen(case.specimen)  # an unknown one is refused before anything starts
    if setting.outputs.paths.get("record") is not None and len(wanted) != 1:
        raise UsageError(f"--record takes one case, and these are {len(wanted)}: choose one --schedule and one --model")
    if setting.outputs.paths.get("record") is not None and wanted[0].replicas > 1:
        raise UsageError(f"--record takes one pipeline, and {wanted[0]} has {wanted[0].replicas} replicas")
    runs = [_run_of(case, setting) for case in wanted]
    return run_all(runs, setting, columns=COLUMNS, left_out=left_out)


def _run_of(case: Case, setting: Setting) -> CaseRun:
    if setting.composed:
        from pipeproof.wings.composed import check_composed

        check_composed(case)
    here, observed = replace(case, device=setting.chosen_device), list[Observed]()

    def judge(world: World) -> Verdict:
        verdict, found = validate_case(here, world, composed=setting.composed)
        observed.extend([] if found is None else [found])
        if setting.plugin is not None:
            verdict = replace(verdict, rerun=f"{verdict.replay} --plugin {shlex.quote(setting.plugin)}")
        return verdict

    def keep() -> None:
        while observed:  # what the ranks gave is large: it is kept no longer than this
            found, record = observed.pop(), setting.outputs.files["record"]
            if record.wanted:
                write(record_observed(here, found), record)
            if setting.profile:
                Terminal().say(profile_table(found.profiles, Terminal().width))

    def doubt() -> str:
        transport, room = (None, 0) if (one := setting.simulation) is None else (one.transport, one.room)
        planted = specimen(case.specimen)
        why = planted.missing(case, transport) or planted.hidden(room)
        return f"this case cannot show {case.specimen}, which {why}" if why else ""

    return CaseRun(str(case), case.processes, judge, partial(line, case), doubt, keep)


def run_all(
    runs: Sequence[CaseRun], setting: Setting, *, columns: Sequence[Column], left_out: Mapping[str, str] = NOTHING
) -> int:
    """Each of ``runs``, a line each and a screen for what is no pass; returns the exit status."""
    terminal, verdicts = Terminal(), list[Verdict]()
    with setting.world() as world:
        for name, reason in left_out.items():
            terminal.detail(f"{name} is left out: {reason}")
        if many := warn_of_crowd(max(run.ranks for run in runs)):
            terminal.detail(many)
        with setting.outputs.asked:
            turns = [(run.title, partial(run.judge, world)) for run in runs]
            for run, verdict in zip(runs, terminal.in_turn(turns), strict=True):
                if not verdicts:
                    terminal.detail(header(columns, terminal.width))
                verdicts.append(verdict)
                passed, more = verdict.outcome == "pass", setting.explain or terminal.manner.verbose
                terminal.tell(run.row(verdict, terminal.width), verdict.word, passed=passed)
                if passed and (why := run.doubt()):
                    terminal.say(why)
                if more or not passed:
                    terminal.tell(verdict.details if more else str(verdict), verdict.word, passed=passed)
                run.keep()
        said = summary(verdicts, left_out=len(left_out)) + not_run(len(runs) - len(verdicts))
        terminal.say(said)
        if world.searched:
            terminal.say(world.searched)
        page = partial(campaign, list(map(CaseResult, verdicts)), said=said, left_out=left_out)
        return setting.outputs.finish(exit_status(verdicts), verdicts, page=page, left_out=dict(left_out))


def not_run(count: int) -> str:
    """The end of a sum: what was asked for and did not run, as somebody ended it."""
    return f"; {count} did not run" if count else ""


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """1 if anything is wrong; else 3 if anything is unknown, or if there is nothing; else 0."""
    found = {verdict.exit_status for verdict in verdicts}
    return 1 if 1 in found else (NO_VERDICT if NO_VERDICT in found or not found else 0)


def validate_case(
    case: Case, world: World, *, measure: bool = True, composed: bool = False
) -> tuple[Verdict, Observed | None]:
    """The verdict on ``case``, and what its ranks gave; "unknown" and None where they failed.

    Of a simulated world's interleavings it is of the first that is no pass, with as few preemptions as it takes, or of
    the last. ``measure``: measure rounding floors even where every bit agrees. ``composed``: without a reference, link
    by link; None is what its ranks gave.
    """
    if (refused := refusal(case)) is not None:
        return refused, None
    began = perf_counter()

    def once() -> tuple[Verdict, Observed | None]:
        return (composed_verdict(case, world), None) if composed else run_to_end(case, world, measure=measure)

    for _ in world.interleavings():
        verdict, observed = once()
        if verdict.outcome != "pass":
            if world.searches and not composed:
                narrow(case, world)
                verdict, observed = once()
            break
    verdict = decided_by(world.complete(verdict), world.decision)
    return replace(verdict, seconds=perf_counter() - began), observed


def composed_verdict(case: Case, world: World) -> Verdict:
    """The verdict on ``case``, held against itself, link by link."""
    from pipeproof.wings.composed import validate_composed

    try:
        verdict = validate_composed(case, world)
    except RankFailed as failure:
        verdict = crash_verdict(case, failure)
    return replace(verdict, rerun=f"{verdict.replay} --check {COMPOSED}")
