"""The gate of a merge: a table of schedules, lines of earlier failures, fuzzing, and a fault that must be caught."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from pipeproof.cases.case import Case, CaseError
from pipeproof.cases.fuzz import Tally, cases, fuzz
from pipeproof.cases.specimens import specimen
from pipeproof.commands.campaign import Setting, enough_ranks, validated
from pipeproof.commands.outputs import Opened, document
from pipeproof.core.verdict import Verdict
from pipeproof.observers.observed import Observed
from pipeproof.pipeline.sizes import SHOWN
from pipeproof.records.case_record import expected_record, observed_record
from pipeproof.records.record_file import write
from pipeproof.reports.columns import header
from pipeproof.reports.gate_reports import CaseResult, GateResult, annotations, junit, markdown
from pipeproof.reports.page.page import CampaignRow, campaign
from pipeproof.reports.table import COLUMNS, line
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.output_file import OutputError, OutputFile
from pipeproof.worlds.world import World

PLANTED = "layernorm-zero"  # what the gate plants to see that it can fail: the loss stays right


@dataclass(frozen=True)
class Plan:
    """What a gate runs: ``table`` and ``pinned`` cases, then ``budget`` drawn ones of ``schedules`` from ``seed``.

    ``missing`` are schedules that were asked for and cannot be, with the reason: a gate without them is short.
    """

    table: Sequence[Case]
    pinned: Sequence[Case]
    schedules: Sequence[str]
    budget: int
    seed: int
    max_ranks: int
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def due(self) -> int:
        """How many cases must run, the planted one included."""
        models = {case.model for case in self.table}
        return len(self.table) + len(self.missing) * len(models) + len(self.pinned) + self.budget + 1


@dataclass(frozen=True)
class Reports:
    """Where a gate's result goes besides the terminal: files, a folder for the records of failing cases."""

    junit: str | None = None
    summary: str | None = None
    artifacts: str | None = None
    github: bool = False


def gate(plan: Plan, setting: Setting, reports: Reports) -> int:
    """Run the gate; returns the exit status. Files are written in the end, and whole, whatever the outcome."""
    if not plan.due - 1:
        raise CaseError("a gate of no cases: give --cases, --case or --schedule")
    for case in plan.pinned:
        specimen(case.specimen)
    folder = _folder(reports.artifacts)
    terminal, device = Terminal(), setting.chosen_device
    with (
        OutputFile(reports.junit) as xml,
        OutputFile(reports.summary) as summary,
        setting.outputs.opened("gate") as files,
        setting.world() as world,
    ):
        run = _GateRun(world, device, terminal)
        with files.asked:
            run.table(plan)
            run.fuzz(plan)
            run.planted()
        result = GateResult(run.results, plan.due, plan.seed, dict(plan.missing))
        for one in result.not_passed[:SHOWN]:
            terminal.say(one.story, one.verdict.verdict)
        terminal.say(str(result))
        terminal.say("\n".join(annotations(result))) if reports.github and result.status else None
        xml.write(junit(result))
        summary.write(markdown(result).encode())
        if folder is not None:
            _keep(folder, result, run.observed)
        return _write(files, result)


class _GateRun:
    """The cases of a gate as they are run, and what the ranks gave in those that were no pass."""

    def __init__(self, world: World, device: str, terminal: Terminal) -> None:
        self._world = world
        self._device = device
        self._terminal = terminal
        self.results: list[CaseResult] = []
        self.observed: dict[Case, Observed] = {}

    def table(self, plan: Plan) -> None:
        """Every schedule that was asked for, and the pinned lines: a line each."""
        for name, reason in plan.missing.items():
            self._terminal.say(f"{name} cannot run: {reason}")
        wanted = [("table", case) for case in plan.table] + [("pinned", case) for case in plan.pinned]
        for number, (group, case) in enumerate(wanted, start=1):
            case = replace(case, device=self._device)
            with self._terminal.progress(f"{number} of {plan.due}: {case}"):
                verdict = self._judged(case, self._world, measure=True)
            if number == 1:
                self._terminal.detail(header(COLUMNS, self._terminal.width))
            told = self._terminal.detail if verdict.verdict == "pass" else self._terminal.say
            told(line(case, verdict, self._terminal.width), verdict.word)
            self.results.append(CaseResult("table" if group == "table" else "pinned", case, verdict))

    def fuzz(self, plan: Plan) -> None:
        """Drawn cases, up to the first that is no pass, which is shrunk."""
        if not plan.budget:
            return
        drawn: list[CaseResult] = []

        def run(case: Case, world: World) -> Verdict:
            verdict = self._judged(case, world)
            drawn.append(CaseResult("fuzz", case, verdict))
            return verdict

        with self._terminal.progress("fuzzing") as show, enough_ranks():
            strategy = cases(schedules=plan.schedules, max_ranks=plan.max_ranks, device=self._device)
            tally = Tally(plan.budget)
            found = fuzz(
                self._world,
                tally,
                seed_=plan.seed,
                strategy=strategy,
                progress=lambda: show(f"{tally.cases} of {tally.budget}: {tally}"),
                run=run,
            )
        self._terminal.say(f"seed {plan.seed}, {tally}")
        self.results += takewhile(lambda one: one.outcome == "pass", drawn)
        if found is not None:  # in the place of all that shrinking tried
            assert found.verdict is not None, "run returns a verdict also where ranks failed"
            self.results.append(CaseResult("fuzz", found.case, found.verdict))

    def planted(self) -> None:
        """A case with a fault in it: a gate that cannot fail proves nothing."""
        case = replace(Case.parse(specimen(PLANTED).smallest), specimen=PLANTED, device=self._device)
        self.results.append(CaseResult("planted", case, self._judged(case, self._world)))
        self._terminal.say(self.results[-1].headline)

    def _judged(self, case: Case, world: World, *, measure: bool = False) -> Verdict:
        verdict, observed = validated(case, world, measure=measure)
        if verdict.verdict != "pass" and observed is not None:
            self.observed[case] = observed
        return verdict


def _folder(path: str | None) -> Path | None:
    """The folder for records, which is made now, so that one that cannot be costs nothing."""
    if path is None:
        return None
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make the folder {path}: {error.strerror or error}; choose a new name in a writable folder"
        ) from error
    return Path(path)


def _keep(folder: Path, result: GateResult, observed: Mapping[Case, Observed]) -> None:
    """Leave, for the first cases that are no pass, the verdict, what was expected, and what the ranks gave."""
    for number, one in enumerate(result.not_passed[:SHOWN], start=1):
        name = str(folder / f"{number}-{one.case.built.name}")
        with OutputFile(f"{name}.txt") as text, OutputFile(f"{name}.json") as data:
            text.write(f"{one.verdict.details}\n".encode())
            data.write_json(document("gate", one.verdict.exit_status, [one.verdict]))
        if one.case in observed:
            with OutputFile(f"{name}.expected") as wanted, OutputFile(f"{name}.observed") as seen:
                write(expected_record(replace(one.case, specimen="")), wanted)
                write(observed_record(one.case, observed[one.case]), seen)


def _write(files: Opened, result: GateResult) -> int:
    groups = [{"group": one.group, "outcome": one.outcome} for one in result.cases]
    verdicts, left_out = [one.verdict for one in result.cases], dict(result.missing)
    more = {"seed": result.seed, "due": result.due, "left_out": left_out}
    return files.finish(result.status, verdicts, groups=groups, page=lambda: _page(result), **more)


def _page(result: GateResult) -> str:
    notes = [one.headline if one.group == "planted" else one.group for one in result.cases]
    entries = [CampaignRow(one.verdict, one.outcome, note) for one, note in zip(result.cases, notes, strict=True)]
    return campaign(entries, said=str(result), left_out=result.missing)
