"""``primitives``: every kind of parallelism, with what it saves and costs; ``validate --primitive`` and ``--stack``."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeproof.commands.option_parser import UsageError, add, refuse_unused
from pipeproof.commands.outputs import Outputs, add_outputs
from pipeproof.commands.selection import OF_TABLE, device_of, schedule_names, tell_notes
from pipeproof.core.mismatch import small
from pipeproof.own.config import Config
from pipeproof.pipeline.sizes import MOST_MICROBATCHES, MOST_SEED, check_count, some
from pipeproof.reports.columns import Column, row, table
from pipeproof.reports.table import OUTCOME, count_compared, outcome
from pipeproof.reports.terminal import Terminal
from pipeproof.wings.primitives import (
    ONE_DEVICE,
    PRIMITIVES,
    SYMBOLS,
    VARIANTS,
    Figures,
    Primitive,
    Stack,
    figures,
    find_primitive,
    smallest_stack,
    validate_stack,
)
from pipeproof.worlds.launcher import start_fork_server

if TYPE_CHECKING:
    from pipeproof.commands.campaign import Then
    from pipeproof.core.verdict import Verdict
    from pipeproof.worlds.world import World

_SAID = ("schedule", "virtual", "microbatches", "seed")  # what a stack takes of the options that say which case
_NAMES = max(map(len, PRIMITIVES)) + 2  # the width of their column
_MICROBATCHES, _SCHEDULE = 4, "1f1b"


def add_primitives_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command."""
    about = "every kind of parallelism: what it saves and costs, what implements it, how it was validated"
    parser = commands.add_parser("primitives", help=about)
    add(parser, "name", None, "show only these (default: all)", nargs="*", known=PRIMITIVES)
    add_outputs(parser, what="the table")
    parser.set_defaults(run=_primitives)


def add_stacks(parser: argparse.ArgumentParser) -> None:
    """What is validated in place of a case: primitives."""
    known = [*PRIMITIVES, *VARIANTS]
    each = f"kinds of parallelism, each alone on a small decoder: all, or some of {', '.join(known)}"
    add(parser, "--primitive", "NAME,...", each, known=("all", *known), default="")
    together = f"several kinds together, with the number of ranks of each: pp=2,tp=2,ddp=2; or {ONE_DEVICE}"
    add(parser, "--stack", "NAME=N,...", together)


def asks_for_stacks(options: argparse.Namespace) -> bool:
    """Whether stacks are to be validated in place of cases, be it with nothing behind ``--primitive``."""
    return options.stack is not None or "--primitive" in options.given or bool(options.primitive)


def _primitives(options: argparse.Namespace) -> int:
    chosen = [PRIMITIVES[find_primitive(name, among=PRIMITIVES)] for name in options.name] or PRIMITIVES.values()
    known = figures()
    with Outputs.of(options).open("primitives") as files:
        for one in chosen:
            Terminal().say("\n".join(_lines(one, known[one.name])) + "\n")
        Terminal().detail(_LEGEND)
        data = [_data(one, known[one.name]) for one in chosen]
        return files.finish(0, primitives=data)


def _lines(one: Primitive, found: Figures) -> Iterator[str]:
    ran = f"{found.passed} of {found.seeds} seeds pass on {some(found.ranks, 'rank')}, torch {found.torch}"
    worst = f"worst error {small(found.worst)}, rounding {small(found.floor)}" if found.worst else "bit for bit"
    rows = [
        ("  saves", " ".join(one.saves)),
        ("  costs", " ".join(one.costs)),
        ("  by", one.implementation),
        ("  here", f"{ran}: {found.parameters} gradients each, {worst}"),
        ("  source", one.source),
    ]
    yield f"{one.name:<{_NAMES}}{one.title}"
    yield table([Column(""), Column("")], rows, Terminal().width)


_LEGEND = (
    "\n".join(f"  {letter} {what}" for letter, what in SYMBOLS.items()) + "\n"
    "Bytes: 2 a weight, 4 a gradient, 12 for Adam.\n"
    "`pipeproof validate --primitive tp` runs one; `--stack pp=2,tp=2,ddp=2` runs several together."
)


def _data(one: Primitive, found: Figures) -> dict[str, object]:
    formulas = {what: {"formula": text, "of": of} for what, (text, of) in (("saves", one.saves), ("costs", one.costs))}
    own = {"name": one.name, "title": one.title, "axes": list(one.axes), **formulas}
    return {**own, "implementation": one.implementation, "source": one.source, "validated": asdict(found)}


def validate_stacks(options: argparse.Namespace) -> int:
    """``validate`` with ``--primitive`` or ``--stack``."""
    if options.stack is not None and ("--primitive" in options.given or options.primitive):
        raise UsageError("--primitive with --stack: expected one of the two; leave one out")
    what = "--stack" if options.stack is not None else "--primitive"
    useless = [*(f"--{name}" for name in OF_TABLE if name not in _SAID), "--config", "--profile", "--record"]
    refuse_unused(options, useless, f"with {what}, which runs a small decoder")
    return _validate(list(stacks_of(options)), options, options.device)


def validate_config(options: argparse.Namespace, config: Config, stack: Stack) -> int:
    """``validate`` with a config of which ``stack`` is run. Its notes are said."""
    refuse_unused(options, ["--profile", "--record"], f"with {options.config}, which is run as a stack")
    tell_notes(config, stack)
    return _validate([stack], options, device_of(options, [config]))


def stacks_of(options: argparse.Namespace) -> Iterator[Stack]:
    """Those that are asked for, with a pipeline on every schedule. Raises ``StackError`` or ``ScheduleError``."""
    microbatches = _MICROBATCHES if options.microbatches is None else options.microbatches
    check_count("microbatches", microbatches, most=MOST_MICROBATCHES)
    check_count("--seed", options.seed, least=0, most=MOST_SEED)
    schedules = schedule_names(options.schedule) if "--schedule" in options.given else [_SCHEDULE]
    if options.stack is not None:
        lines = [options.stack]
    else:
        every = options.primitive.strip().lower() == "all"
        lines = list(map(smallest_stack, PRIMITIVES if every else map(str.strip, options.primitive.split(","))))
    found = [Stack.parse(line, microbatches=microbatches, seed=options.seed) for line in lines]
    piped = any(stack.has_pipeline for stack in found)
    why = f"with {', '.join(lines)}, which has no pp"
    refuse_unused(options, ["--schedule", "--virtual"], why, where=not piped)
    for line, stack in zip(lines, found, strict=True):
        for name in schedules if stack.has_pipeline else [_SCHEDULE]:
            virtual = options.virtual if stack.has_pipeline else None
            yield Stack.parse(line, schedule=name, virtual=virtual, microbatches=microbatches, seed=options.seed)


def _validate(stacks: Sequence[Stack], options: argparse.Namespace, device: str) -> int:
    """Validate each, a line each; returns the exit status."""
    refuse_unused(options, ["--world"], "with parallel primitives, which run on real ranks")
    start_fork_server()
    from pipeproof.commands.campaign import CaseRun, Setting, run_all
    from pipeproof.whitebox import WhiteBox

    def judge(stack: Stack, world: "World", _: object) -> "tuple[Verdict, Then]":
        return validate_stack(stack, WhiteBox(world)), lambda: None

    longest = max(len(str(stack)) for stack in stacks)
    columns = (Column("stack", longest + 1), *_FIGURES)  # which is never cut: it tells one from another
    runs = [CaseRun(str(one), one.ranks, partial(judge, one), partial(_row, one, columns)) for one in stacks]
    return run_all(runs, Setting(device, options.timeout, Outputs.of(options)), columns=columns)


_FIGURES = (
    Column("schedule", 11, drop=7),
    Column("ranks", 5, right=True, drop=4),
    Column("M", 3, right=True, drop=6),
    Column("losses", 6, right=True, drop=8),
    Column("params", 6, right=True, drop=5),
    Column("copies", 6, right=True, drop=9),
    Column("shards", 6, right=True, drop=10),
    *OUTCOME,
)


def _row(stack: Stack, columns: Sequence[Column], verdict: "Verdict", width: int | None) -> str:
    cells = [str(stack), stack.schedule if stack.has_pipeline else "", str(stack.ranks), str(stack.microbatches)]
    counts = count_compared(verdict, "loss", "gradient", "replicas", "shards")
    return row(columns, [*cells, *counts, *outcome(verdict)], width)
