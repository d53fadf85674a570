"""Running cases and showing how it goes: what the commands ``validate``, ``fuzz`` and ``replay`` do."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from types import MappingProxyType

import torch._dynamo  # noqa: F401  # the reference's optimizer wants it: better now, while the fork server imports it

from pipeproof.cases.case import Case
from pipeproof.cases.interleavings import narrow
from pipeproof.cases.judgement import judge
from pipeproof.cases.observe import observe
from pipeproof.cases.specimens import specimen
from pipeproof.cases.validator import crashed, explained, refusal
from pipeproof.commands.ending import NO_VERDICT
from pipeproof.commands.outputs import Opened, Outputs
from pipeproof.core.verdict import Verdict
from pipeproof.foreign.elsewhere import told_of_transports
from pipeproof.observers.observed import Observed
from pipeproof.records.case_record import observed_record
from pipeproof.records.record_file import write
from pipeproof.reports.columns import Column, header
from pipeproof.reports.page.page import CampaignRow, campaign
from pipeproof.reports.table import COLUMNS, line, profile_table, summary
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds import accelerator
from pipeproof.worlds.accelerator import AUTO, CPU
from pipeproof.worlds.kinds import SIMULATED
from pipeproof.worlds.processors import crowded
from pipeproof.worlds.rank_report import NeedsMoreRanks, RankFailed
from pipeproof.worlds.simulated.exploration import told
from pipeproof.worlds.simulation import Simulation, Timing
from pipeproof.worlds.world import World

_MOST_GROUPS = 100  # process groups that jobs may leave on a rank; to replace ranks takes seconds

CHECK_COMPOSED = "--check composed"
NOTHING: Mapping[str, str] = MappingProxyType({})


class Impossible(ValueError):
    """A request that these ranks or this machine cannot meet."""


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
    simulation: Simulation | None = None
    composed: bool = False

    def world(self) -> World:
        """The ranks. What they print is for who asks for more, or runs one case to look into it."""
        silent = not (self.explain or Terminal().manner.verbose)
        if (simulation := self.simulation) is not None:
            world = World(kind=SIMULATED, timeout_s=self.timeout_s, silent=silent)
            world.decide(simulation)
            world.timing = Timing(measured=self.profile)
            return world
        return World(device=self.chosen_device, timeout_s=self.timeout_s, silent=silent, most_groups=_MOST_GROUPS)

    @property
    def chosen_device(self) -> str:
        """The type of device. Raises ``Impossible`` for one that is not here."""
        if self.simulation is not None and self.device in (AUTO, CPU):
            return CPU
        if self.simulation is not None:
            raise Impossible(f"--device {self.device} with --world simulated: simulated ranks compute on cpu alone")
        if self.device == AUTO:
            return accelerator.found()
        if why := accelerator.absence(self.device):
            cure = f"use --device cpu, or torch built for {self.device} on a machine that has one"
            raise Impossible(f"--device {self.device}, but {why}: {cure}")
        return self.device


Then = Callable[[], None]  # what is left to do once a verdict is told


@dataclass(frozen=True)
class CaseRun:
    """One thing to validate.

    ``judge`` gives its verdict. ``row`` is the table's line of it, as wide as it may be. ``doubt``: why a pass says
    less than it seems; empty if it does not.
    """

    title: str
    ranks: int
    judge: Callable[[World, Opened], tuple[Verdict, Then]]
    row: Callable[[Verdict, int | None], str]
    doubt: Callable[[], str] = str


def validate_all(wanted: Sequence[Case], setting: Setting, *, left_out: Mapping[str, str] = NOTHING) -> int:
    """Validate each case, a line each and a screen for what is no pass; returns the exit status.

    ``left_out`` are schedules that were asked for and cannot be, with the reason; they are said and counted.
    """
    for case in wanted:
        specimen(case.specimen)  # an unknown one is refused before anything starts
    if setting.outputs.record is not None and len(wanted) != 1:
        raise Impossible(f"--record takes one case, and these are {len(wanted)}: choose one --schedule and one --model")
    if setting.outputs.record is not None and wanted[0].replicas > 1:
        raise Impossible(f"--record takes one pipeline, and {wanted[0]} has {wanted[0].replicas} replicas")
    runs = [_run_of(case, setting) for case in wanted]
    return run_all(runs, setting, columns=COLUMNS, left_out=left_out)


def _run_of(case: Case, setting: Setting) -> CaseRun:
    if setting.composed:
        from pipeproof.wings.composed import check_composed

        check_composed(case)
    here = replace(case, device=setting.chosen_device)

    def judge(world: World, files: Opened) -> tuple[Verdict, Then]:
        verdict, observed = validated(here, world, composed=setting.composed)
        if setting.plugin is not None:
            verdict = replace(verdict, rerun=f"{verdict.replay} --plugin {shlex.quote(setting.plugin)}")
        return verdict, partial(_keep, here, observed, files, profile=setting.profile)

    def doubt() -> str:
        transport, room = (None, 0) if (one := setting.simulation) is None else (one.transport, one.room)
        planted = specimen(case.specimen)
        why = planted.missing(case, transport) or planted.hidden(room)
        return f"this case cannot show {case.specimen}, which {why}" if why else ""

    return CaseRun(str(case), case.processes, judge, partial(line, case), doubt)


def _keep(case: Case, observed: Observed | None, files: Opened, *, profile: bool) -> None:
    """Write what the ranks gave, and say where their time went, if that is wanted."""
    if observed is not None and files.record.wanted:
        write(observed_record(case, observed), files.record)
    if observed is not None and profile:
        Terminal().say(profile_table(observed.profiles, Terminal().width))


def run_all(
    runs: Sequence[CaseRun], setting: Setting, *, columns: Sequence[Column], left_out: Mapping[str, str] = NOTHING
) -> int:
    """Each of ``runs``, a line each and a screen for what is no pass; returns the exit status."""
    terminal, verdicts = Terminal(), list[Verdict]()
    with (
        setting.outputs.opened("replay" if setting.explain else "validate") as files,
        setting.world() as world,
    ):
        for name, reason in left_out.items():
            terminal.detail(f"{name} is left out: {reason}")
        if many := crowded(max(run.ranks for run in runs)):
            terminal.detail(many)
        with files.asked:
            for number, run in enumerate(runs, start=1):
                with terminal.progress(f"{number} of {len(runs)}: {run.title}"):
                    verdict, then = run.judge(world, files)
                if not verdicts:
                    terminal.detail(header(columns, terminal.width))
                verdicts.append(verdict)
                _tell(terminal, run, verdict, setting)
                then()
        said = summary(verdicts, left_out=len(left_out)) + not_run(len(runs) - len(verdicts))
        terminal.say(said)
        if searched := told(world.explorations):
            terminal.say(searched)
        entries = [CampaignRow(one, one.verdict) for one in verdicts]
        page = partial(campaign, entries, said=said, left_out=left_out)
        return files.finish(exit_status(verdicts), verdicts, page=page, left_out=dict(left_out))


def not_run(count: int) -> str:
    """The end of a sum: what was asked for and did not run, as somebody ended it."""
    return f"; {count} did not run" if count else ""


def _tell(terminal: Terminal, run: CaseRun, verdict: Verdict, setting: Setting) -> None:
    """A line, and a screen where there is more to say or somebody asked."""
    passed = verdict.verdict == "pass"
    (terminal.detail if passed else terminal.say)(run.row(verdict, terminal.width), verdict.word)
    if passed and (why := run.doubt()):
        terminal.say(why)
    if setting.explain or not passed or terminal.manner.verbose:
        text = verdict.details if setting.explain or terminal.manner.verbose else str(verdict)
        (terminal.detail if passed else terminal.say)(text, verdict.word)


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """1 if anything is wrong; else 3 if anything is unknown, or if there is nothing; else 0."""
    found = {verdict.exit_status for verdict in verdicts}
    return 1 if 1 in found else (NO_VERDICT if NO_VERDICT in found or not found else 0)


def validated(
    case: Case, world: World, *, measure: bool = True, composed: bool = False
) -> tuple[Verdict, Observed | None]:
    """The verdict on ``case``, and what its ranks gave; "unknown" and None where they failed.

    Of a simulated world's interleavings it is of the first that is no pass, with as few preemptions as it takes, or of
    the last. ``measure``: measure rounding floors even where every bit agrees. ``composed``: without a reference, link
    by link; None is what its ranks gave. Raises ``Impossible`` for too small a world.
    """
    if (refused := refusal(case)) is not None:
        return refused, None
    began = perf_counter()
    once = partial(_validated, case, world, measure=measure, composed=composed)
    for _ in world.interleavings():
        verdict, observed = once()
        if verdict.verdict != "pass":
            if world.searches and not composed:
                narrow(case, world)
                verdict, observed = once()
            break
    verdict = told_of_transports(verdict, world)
    return replacing(verdict, world.simulation, seconds=perf_counter() - began), observed


def replacing(verdict: Verdict, simulation: Simulation | None, *, seconds: float) -> Verdict:
    """``verdict`` with what it took, and a replay line that names what decided the run which it is of."""
    rerun = verdict.rerun if simulation is None else f"{verdict.replay} {simulation.options}"
    return replace(verdict, seconds=seconds, rerun=rerun)


def _validated(case: Case, world: World, *, measure: bool, composed: bool) -> tuple[Verdict, Observed | None]:
    if composed:
        return composed_verdict(case, world), None
    try:
        with enough_ranks():
            observed = observe(case, world)
    except RankFailed as failure:
        return crashed(case, failure), None
    verdict = judge(case, observed, measure=measure)
    if verdict.verdict == "fail":
        verdict = explained(case, world, observed, verdict)
    return verdict, observed


def composed_verdict(case: Case, world: World) -> Verdict:
    """The verdict on ``case``, held against itself, link by link. Raises ``Impossible`` for too small a world."""
    from pipeproof.wings.composed import validate_composed

    try:
        with enough_ranks():
            verdict = validate_composed(case, world)
    except RankFailed as failure:
        verdict = crashed(case, failure)
    return replace(verdict, rerun=f"{verdict.replay} {CHECK_COMPOSED}")


@contextmanager
def enough_ranks() -> Iterator[None]:
    """Turn a launcher's shortage of ranks into a sentence for whoever asked for too many."""
    try:
        yield
    except NeedsMoreRanks as error:
        raise Impossible(f"{error}; start more ranks, or ask for fewer with --ranks or --max-ranks") from error
