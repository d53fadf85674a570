"""The gate of a merge: steps of the user's, schedules, earlier failures, fuzzing, and faults that must be caught."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from pipeproof.commands.campaign import Setting, validate_case
from pipeproof.commands.outputs import document
from pipeproof.commands.own_step import OwnStep
from pipeproof.commands.step_commands import COLUMNS as STEP_COLUMNS
from pipeproof.commands.step_commands import judge_step
from pipeproof.commands.step_commands import line as line_of_step
from pipeproof.core.observe.observed import Observed
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case, CaseError
from pipeproof.own.faults import specimen
from pipeproof.own.fuzz import Tally, cases, fuzz
from pipeproof.pipeline.sizes import SHOWN
from pipeproof.records.case_record import record_expected, record_observed
from pipeproof.records.record_file import write
from pipeproof.reports.columns import header
from pipeproof.reports.gate_reports import CaseResult, GateResult, Group, annotations, junit, markdown
from pipeproof.reports.page.page import CampaignRow, campaign
from pipeproof.reports.table import COLUMNS, line
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.output_file import OutputError, OutputFile
from pipeproof.worlds.world import World

PLANTED = "layernorm-zero"  # what the gate plants to see that it can fail: the loss stays right
PLANTED_IN_STEPS = "gradient-doubled"


@dataclass(frozen=True)
class Plan:
    """What a gate runs: ``steps``, ``table`` and ``pinned`` cases, and a ``budget`` of drawn ones.

    Drawn are cases of ``schedules``, from ``seed``. ``missing`` are schedules that were asked for and cannot be, with
    the reason: a gate without them is short.
    """

    table: Sequence[Case]
    pinned: Sequence[Case]
    schedules: Sequence[str]
    budget: int
    seed: int
    max_ranks: int
    missing: Mapping[str, str] = field(default_factory=dict)
    steps: Sequence[OwnStep] = ()

    @property
    def of_cases(self) -> int:
        """How many cases of built-in schedules there are, without the planted one."""
        models = {case.model for case in self.table}
        return len(self.table) + len(self.missing) * len(models) + len(self.pinned) + self.budget

    @property
    def case_count(self) -> int:
        """How many cases must run, the planted ones included."""
        return 2 * len(self.steps) + self.of_cases + bool(self.of_cases)


def gate(plan: Plan, setting: Setting, options: Namespace) -> int:
    """Run the gate; returns the exit status. Files are written in the end, and whole, whatever the outcome.

    ``options`` say where reports go: ``junit``, ``summary``, ``artifacts`` and ``annotations``.
    """
    if not plan.case_count:
        raise CaseError("a gate of no cases: give --cases, --case or --schedule")
    loaded = [step.load() for step in plan.steps]
    for case in plan.pinned:
        specimen(case.specimen)
    folder = None if options.artifacts is None else Path(options.artifacts)
    if folder is not None:  # made now, so that one that cannot be costs nothing
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"{error.strerror or error}; choose a new name in a writable folder"
            raise OutputError(f"cannot make the folder {folder}: {why}") from error
    terminal, device = Terminal(), setting.chosen_device
    with (
        OutputFile(options.junit) as xml,
        OutputFile(options.summary) as summary,
        setting.outputs.open("gate") as files,
        setting.world() as world,
    ):
        run = _GateRun(world, device, terminal)
        with files.asked:
            for step, given in zip(plan.steps, loaded, strict=True):
                run.step(step, given, setting)
            if plan.of_cases:
                run.cases(plan)
        result = GateResult(run.results, plan.case_count - run.unplanted, plan.seed, dict(plan.missing))
        for one in result.not_passed[:SHOWN]:
            terminal.say(one.story, one.verdict.outcome)
        terminal.say(str(result))
        if options.annotations == "github" and result.status:
            terminal.say("\n".join(annotations(result)))
        xml.write(junit(result))
        summary.write(markdown(result, page=options.html or "").encode())
        if folder is not None:
            run.keep(folder, result)
        groups = [{"group": one.group, "gate_outcome": one.outcome} for one in result.cases]
        more = {"seed": result.seed, "case_count": result.case_count, "left_out": dict(result.missing)}
        verdicts = [one.verdict for one in result.cases]
        return files.finish(result.status, verdicts, groups=groups, page=partial(_page, result), **more)


class _GateRun:
    """The cases of a gate as they are run, and what the ranks gave in those that were no pass."""

    def __init__(self, world: World, device: str, terminal: Terminal) -> None:
        self._world = world
        self._device = device
        self._terminal = terminal
        self.results: list[CaseResult] = []
        self.unplanted = 0
        self.observed: dict[str, tuple[Case, Observed]] = {}

    def step(self, step: OwnStep, given: dict[str, Any], setting: Setting) -> None:
        """A step of the user's, and then the same with a fault in it."""
        from pipeproof.wings.mutate import PlantedStep

        def judge(run: Any, title: str) -> Verdict:
            with self._terminal.progress(title):
                return judge_step(step, given | {"step": run}, self._world, setting)

        verdict, planted = judge(given["step"], step.name), f"{step.name} with {PLANTED_IN_STEPS}"
        if not self.results:
            self._terminal.detail(header(STEP_COLUMNS, self._terminal.width))
        shown = line_of_step(step, verdict, self._terminal.width)
        self._terminal.tell(shown, verdict.word, passed=verdict.outcome == "pass")
        self.results.append(CaseResult("step", step.name, verdict, step.name))
        if verdict.outcome != "pass":  # it would be no pass with a fault, either
            self.unplanted += 1
            return
        wrong = judge(PlantedStep(given["step"], PLANTED_IN_STEPS, step.processes - 1), planted)
        self.results.append(CaseResult("planted", planted, wrong, step.name, fault=PLANTED_IN_STEPS))
        self._terminal.say(self.results[-1].headline)

    def cases(self, plan: Plan) -> None:
        """Every schedule that was asked for and the pinned lines, a line each; drawn ones; and one with a fault."""
        terminal = self._terminal
        for name, reason in plan.missing.items():
            terminal.say(f"{name} cannot run: {reason}")
        groups: list[Group] = [*["table"] * len(plan.table), *["pinned"] * len(plan.pinned)]  # type: ignore[list-item]
        wanted = [replace(case, device=self._device) for case in (*plan.table, *plan.pinned)]
        runs = [(str(case), partial(self._judge, case, self._world, measure=True)) for case in wanted]
        for group, case, verdict in zip(groups, wanted, terminal.in_turn(runs, of=plan.case_count), strict=True):
            if case is wanted[0]:
                terminal.detail(header(COLUMNS, terminal.width))
            terminal.tell(line(case, verdict, terminal.width), verdict.word, passed=verdict.outcome == "pass")
            self.results.append(_of_case(group, case, verdict))
        if plan.budget:
            self._fuzz(plan)
        # A gate that cannot fail proves nothing.
        case = replace(Case.parse(specimen(PLANTED).smallest), specimen=PLANTED, device=self._device)
        self.results.append(_of_case("planted", case, self._judge(case, self._world)))
        terminal.say(self.results[-1].headline)

    def _fuzz(self, plan: Plan) -> None:
        """Drawn cases, up to the first that is no pass, which is shrunk."""
        drawn, tally = list[CaseResult](), Tally(plan.budget)

        def run(case: Case, world: World) -> Verdict:
            verdict = self._judge(case, world)
            drawn.append(_of_case("fuzz", case, verdict))
            return verdict

        with self._terminal.progress("fuzzing") as show:
            found = fuzz(
                self._world,
                tally,
                seed_=plan.seed,
                strategy=cases(schedules=plan.schedules, max_ranks=plan.max_ranks, device=self._device),
                progress=lambda: show(f"{tally.cases} of {tally.budget}: {tally}"),
                run=run,
            )
        self._terminal.say(f"seed {plan.seed}, {tally}")
        self.results += takewhile(lambda one: one.outcome == "pass", drawn)
        if found is not None:  # in the place of all that shrinking tried
            self.results.append(_of_case("fuzz", found.case, found.verdict))

    def _judge(self, case: Case, world: World, *, measure: bool = False) -> Verdict:
        verdict, observed = validate_case(case, world, measure=measure)
        if verdict.outcome != "pass" and observed is not None:
            self.observed[str(case)] = case, observed
        return verdict

    def keep(self, folder: Path, result: GateResult) -> None:
        """Leave, for the first cases that are no pass, the verdict, what was expected, and what the ranks gave."""
        for number, one in enumerate(result.not_passed[:SHOWN], start=1):
            name = str(folder / f"{number}-{one.kind}")
            with OutputFile(f"{name}.txt") as text, OutputFile(f"{name}.json") as data:
                text.write(f"{one.verdict.details}\n".encode())
                data.write_json(document("gate", one.verdict.exit_status, [one.verdict]))
            if one.title in self.observed:
                case, found = self.observed[one.title]
                with OutputFile(f"{name}.expected") as expected_file, OutputFile(f"{name}.observed") as observed_file:
                    write(record_expected(replace(case, specimen="")), expected_file)
                    write(record_observed(case, found), observed_file)


def _of_case(group: Group, case: Case, verdict: Verdict) -> CaseResult:
    size = (case.stages, case.microbatches)
    return CaseResult(group, str(case), verdict, case.built.name, size, case.specimen)


def _page(result: GateResult) -> str:
    notes = [one.headline if one.group == "planted" else one.group for one in result.cases]
    entries = [CampaignRow(one.verdict, one.outcome, note) for one, note in zip(result.cases, notes, strict=True)]
    return campaign(entries, said=str(result), left_out=result.missing)
