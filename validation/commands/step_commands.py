"""What verbs do with a step of the user's own: ``validate``, ``replay``, ``mutate``, ``record`` and ``fuzz``."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from pipeproof.commands.campaign import CaseRun, Setting, run_all
from pipeproof.commands.ending import NO_VERDICT, WRONG
from pipeproof.commands.option_parser import UsageError
from pipeproof.commands.own_step import OwnStep
from pipeproof.core.contract import DEFAULTS
from pipeproof.core.verdict import Verdict
from pipeproof.pipeline.sizes import some
from pipeproof.records.step_record import record_step, write_record
from pipeproof.reports.columns import Column, row
from pipeproof.reports.table import OUTCOME, count_compared, outcome
from pipeproof.reports.terminal import Terminal
from pipeproof.whitebox import WhiteBox
from pipeproof.worlds.accelerator import AUTO
from pipeproof.worlds.world import World

COLUMNS = (
    Column("step", 24),
    Column("ranks", 5, right=True, drop=4),
    Column("losses", 6, right=True, drop=7),
    Column("params", 6, right=True, drop=6),
    *OUTCOME,
)


def validate_step(step: OwnStep, setting: Setting) -> int:
    """Validate one; returns the exit status."""
    judge = partial(judge_step, step, step.load(), setting=setting)
    run = CaseRun(step.name, step.processes, judge, partial(line, step))
    return run_all([run], setting, columns=COLUMNS)


def judge_step(step: OwnStep, given: dict[str, Any], world: World, setting: Setting) -> Verdict:
    """The verdict on what ``load`` gave of a step, with the line that replays it."""
    return replace(WhiteBox(world).validate(**given), rerun=_replay_line(step, world, setting))


def _replay_line(step: OwnStep, world: World, setting: Setting, case: str = "") -> str:
    """The line that replays a step on the same device, by the same decision."""
    device = "" if setting.device == AUTO else f"--device {setting.device}"
    decided = "" if world.decision is None else world.decision.options
    return " ".join(filter(None, (step.replay(case), device, decided)))


def line(step: OwnStep, verdict: Verdict, width: int | None) -> str:
    """One line of the table of ``COLUMNS``."""
    cells = [step.name, str(step.processes), *count_compared(verdict, "loss", "gradient"), *outcome(verdict)]
    return row(COLUMNS, cells, width)


def record_own(step: OwnStep, path: str) -> int:
    """Write what the reference of a step gives, for ``check_step(against=path)``; returns the exit status."""
    given = step.load()
    contract, model = given.get("contract"), given["reference"]()
    loss_fn, make = given.get("loss_fn"), given.get("optimizer")
    if loss_fn is None:
        raise UsageError(f"{step.origin} has no loss_fn: a record needs one, of an output and a target; add it")
    optimizer = None if make is None else make(model)
    with Terminal().progress(f"the reference of {step.name}"):
        more = {} if contract is None else {"contract": contract}
        record = record_step(model, given["microbatches"], loss_fn=loss_fn, optimizer=optimizer, **more)
    write_record(record, path)
    (one,) = record.operations
    counts = f"{some(len(one.losses), 'loss')}, {some(len(one.gradients), 'gradient')}"
    Terminal().say(f"{path}: expected of {step.name}: {counts}; check_step(..., against={path!r}) reads it")
    return 0


def mutate_own(step: OwnStep, setting: Setting, *, only: Sequence[str]) -> int:
    """Plant faults in a step, one after the other; 1 where one is let pass, 3 where one is not judged, or none was."""
    from pipeproof.wings.mutate import Mutated, choose, mutate_step

    terminal, given, names = Terminal(), step.load(), choose(only)
    with setting.world() as world:

        def judge(planted: Callable[..., Any]) -> Verdict:
            return judge_step(step, given | {"step": planted}, world, setting)

        with terminal.progress(f"{step.name} as it is"):
            plain = judge(given["step"])
        if plain.outcome != "pass":
            terminal.say("no fault is planted, for the step is no pass without one:")
            terminal.verdict(plain)
            return setting.outputs.finish(plain.exit_status, [plain], tried=[])
        tried = list[Any]()
        with setting.outputs.asked, terminal.progress("faults") as show:
            for one in mutate_step(given["step"], judge, ranks=step.processes, only=names):
                tried.append(one)
                show(f"{len(tried)} faults, the last {one.name}: {one.outcome}")
        outcomes = {one.outcome for one in tried}
        terminal.say(str(Mutated(tuple(tried))) if tried else "no fault was planted")
        doubt = "not judged" in outcomes or "caught" not in outcomes
        status = WRONG if "let pass" in outcomes else NO_VERDICT if doubt else 0
        return setting.outputs.finish(status, tried=[asdict(one) for one in tried])


def fuzz_own(step: OwnStep, setting: Setting, **words: Any) -> int:
    """Draw ranks, microbatches and splits for a step, as its table ``fuzz`` says; returns the exit status.

    ``words`` are of the campaign: its ``cases`` and ``seed``, or the one ``case`` that was drawn before.
    """
    from pipeproof.whitebox.fuzzing import Subject, run_campaign  # with them comes what only campaigns need
    from pipeproof.whitebox.space import Campaign

    drawn = step.load_fuzz()
    if "data" not in drawn:
        raise UsageError(
            f"{step.origin} has no fuzz.data, which makes a microbatch of its number, rows and a torch.Generator: add "
            'fuzz = {data = "tests.my_pipeline:draw"}'
        )
    given, data = step.load(), drawn.pop("data")
    kept = {key: given[key] for key in ("loss_fn", "optimizer") if key in given}
    with setting.world() as world:
        judge = partial(WhiteBox(world).validate, **kept)
        contract = given.get("contract", DEFAULTS)
        subject = Subject(
            given["step"],
            given["reference"],
            data,
            contract,
            judge,
            rerun=lambda one: _replay_line(step, world, setting, str(one)),
        )
        found = run_campaign(subject, Campaign.of(None, {"ranks": step.processes, **words, **drawn}), world)
        Terminal().say(str(found))
        status = 0 if found else found.verdict.exit_status or NO_VERDICT
        verdicts = [] if found and not setting.explain else [found.verdict]
        return setting.outputs.finish(status, verdicts, **{name: one for name, one in words.items() if name == "seed"})
