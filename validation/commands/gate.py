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
from pipeproof.reports.page.page import campaign
from pipeproof.reports.table import COLUMNS, line
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.output_file import OutputFile
from pipeproof.worlds.world import World

PLANTED = "layernorm-zero"  # what the gate plants to see that it can fail: the loss stays right
PLANTED_IN_STEPS = "gradient-doubled"


@dataclass
class Gate:
    """What a gate runs: ``steps``, ``table`` and ``pinned`` cases, and a ``budget`` of drawn ones; and its results.

    Drawn are cases of ``schedules``, from ``seed``. ``missing`` are schedules that were asked for and cannot be, with
    the reason: a gate without them is short. ``observed``: what the ranks gave in cases that were no pass.
    """

    setting: Setting
    steps: Sequence[OwnStep]
    table: Sequence[Case]
    missing: Mapping[str, str]
    pinned: Sequence[Case]
    schedules: Sequence[str]
    budget: int
    seed: int
    max_ranks: int
    results: list[CaseResult] = field(default_factory=list)
    observed: dict[str, tuple[Case, Observed]] = field(default_factory=dict)

    @property
    def of_cases(self) -> int:
        """How many cases of built-in schedules there are, without the planted one."""
        models = {case.model for case in self.table}
        return len(self.table) + len(self.missing) * len(models) + len(self.pinned) + self.budget

    @property
    def case_count(self) -> int:
        """How many cases must run, the planted ones included."""
        # A step that is no pass would be none with a fault, either: nothing is planted in it.
        unplanted = sum(one.group == "step" and one.outcome != "pass" for one in self.results)
        return 2 * len(self.steps) - unplanted + self.of_cases + bool(self.of_cases)

    def run(self, options: Namespace) -> int:
        """Run the gate; returns the exit status. Files are written in the end, and whole, whatever the outcome.

        ``options`` say where reports go: ``html``, ``artifacts`` and ``annotations``.
        """
        if not self.case_count:
            raise CaseError("a gate of no cases: give --cases, --case or --schedule")
        loaded = [step.load() for step in self.steps]
        for case in self.pinned:
            specimen(case.specimen)
        terminal, outputs = Terminal(), self.setting.outputs
        with self.setting.world() as world:
            with outputs.asked:
                for step, given in zip(self.steps, loaded, strict=True):
                    self._step(step, given, world)
                if self.of_cases:
                    self._cases(world)
            result = GateResult(self.results, self.case_count, self.seed, dict(self.missing))
            for one in result.not_passed[:SHOWN]:
                terminal.say(one.story, one.verdict.outcome)
            terminal.say(str(result))
            if options.annotations == "github" and result.status:
                terminal.say("\n".join(annotations(result)))
            outputs.files["junit"].write(junit(result))
            outputs.files["summary"].write(markdown(result, page=options.html or "").encode())
            if options.artifacts is not None:
                self._leave(Path(options.artifacts), result)
            groups = [{"group": one.group, "gate_outcome": one.outcome} for one in result.cases]
            more = {"seed": result.seed, "case_count": result.case_count, "left_out": dict(result.missing)}
            page = partial(campaign, result.cases, said=str(result), left_out=result.missing)
            verdicts = [one.verdict for one in result.cases]
            return outputs.finish(result.status, verdicts, groups=groups, page=page, **more)

    def _step(self, step: OwnStep, given: dict[str, Any], world: World) -> None:
        """A step of the user's, and then the same with a fault in it."""
        from pipeproof.wings.mutate import PlantedStep

        terminal = Terminal()

        def judge(run: Any, title: str) -> Verdict:
            with terminal.progress(title):
                return judge_step(step, given | {"step": run}, world, self.setting)

        verdict, planted = judge(given["step"], step.name), f"{step.name} with {PLANTED_IN_STEPS}"
        if not self.results:
            terminal.detail(header(STEP_COLUMNS, terminal.width))
        shown = line_of_step(step, verdict, terminal.width)
        terminal.tell(shown, verdict.word, passed=verdict.outcome == "pass")
        self.results.append(CaseResult(verdict, "step", step.name, step.name))
        if verdict.outcome != "pass":
            return
        wrong = judge(PlantedStep(given["step"], PLANTED_IN_STEPS, step.processes - 1), planted)
        self.results.append(CaseResult(wrong, "planted", planted, step.name, fault=PLANTED_IN_STEPS))
        terminal.say(self.results[-1].headline)

    def _cases(self, world: World) -> None:
        """Every schedule that was asked for and the pinned lines, a line each; drawn ones; and one with a fault."""
        terminal, device = Terminal(), self.setting.chosen_device
        for name, reason in self.missing.items():
            terminal.say(f"{name} cannot run: {reason}")
        wanted = [replace(case, device=device) for case in (*self.table, *self.pinned)]
        runs = [(str(case), partial(self._judge, case, world, measure=True)) for case in wanted]
        for k, verdict in enumerate(terminal.in_turn(runs, of=self.case_count)):
            if k == 0:
                terminal.detail(header(COLUMNS, terminal.width))
            terminal.tell(line(wanted[k], verdict, terminal.width), verdict.word, passed=verdict.outcome == "pass")
            self.results.append(_of_case("table" if k < len(self.table) else "pinned", wanted[k], verdict))
        if self.budget:
            self._fuzz(world, device)
        # A gate that cannot fail proves nothing.
        case = replace(Case.parse(specimen(PLANTED).smallest), specimen=PLANTED, device=device)
        self.results.append(_of_case("planted", case, self._judge(case, world)))
        terminal.say(self.results[-1].headline)

    def _fuzz(self, world: World, device: str) -> None:
        """Drawn cases, up to the first that is no pass, which is shrunk."""
        drawn, tally, terminal = list[CaseResult](), Tally(self.budget), Terminal()

        def run(case: Case, world: World) -> Verdict:
            verdict = self._judge(case, world)
            drawn.append(_of_case("fuzz", case, verdict))
            return verdict

        with terminal.progress("fuzzing") as show:
            found = fuzz(
                world,
                tally,
                seed_=self.seed,
                strategy=cases(schedules=self.schedules, max_ranks=self.max_ranks, device=device),
                progress=lambda: show(f"{tally.cases} of {tally.budget}: {tally}"),
                run=run,
            )
        terminal.say(f"seed {self.seed}, {tally}")
        self.results += takewhile(lambda one: one.outcome == "pass", drawn)
        if found is not None:  # in the place of all that shrinking tried
            self.results.append(_of_case("fuzz", found.case, found.verdict))

    def _judge(self, case: Case, world: World, *, measure: bool = False) -> Verdict:
        verdict, observed = validate_case(case, world, measure=measure)
        if verdict.outcome != "pass" and observed is not None:
            self.observed[str(case)] = case, observed
        return verdict

    def _leave(self, folder: Path, result: GateResult) -> None:
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
    return CaseResult(verdict, group, str(case), case.built.name, size, case.specimen)
