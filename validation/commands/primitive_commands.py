"""``validate --primitive`` and ``--stack``, and ``advise --primitive``: kinds of parallelism."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from pipeproof.commands.option_parser import UsageError, add, refuse_unused
from pipeproof.commands.outputs import Outputs
from pipeproof.commands.selection import OF_TABLE, device_of, schedule_names, tell_notes
from pipeproof.own.config import Config
from pipeproof.pipeline.sizes import MOST_MICROBATCHES, MOST_SEED, check_count
from pipeproof.reports.columns import Column, row
from pipeproof.reports.table import OUTCOME, count_compared, outcome
from pipeproof.reports.terminal import Terminal
from pipeproof.wings.primitives import (
    LEGEND,
    ONE_DEVICE,
    PRIMITIVES,
    VARIANTS,
    Stack,
    as_data,
    describe,
    figures,
    find_primitive,
    smallest_stack,
    validate_stack,
)
from pipeproof.worlds.launcher import start_fork_server

if TYPE_CHECKING:
    from pipeproof.core.verdict import Verdict
    from pipeproof.worlds.world import World

_SAID = ("schedule", "virtual", "microbatches", "seed")  # what a stack takes of the options that say which case
_MICROBATCHES, _SCHEDULE = 4, "1f1b"


def add_stacks(parser: argparse.ArgumentParser) -> None:
    """What is validated in place of a case: primitives."""
    known = [*PRIMITIVES, *VARIANTS]
    each = f"kinds of parallelism, each alone on a small decoder: all, or some of {', '.join(known)}"
    add(parser, "--primitive", "NAME,...", each, known=("all", *known), default="", rare=True)
    together = f"several kinds together, with the number of ranks of each: pp=2,tp=2,ddp=2; or {ONE_DEVICE}"
    add(parser, "--stack", "NAME=N,...", together, rare=True)


def asks_for_stacks(options: argparse.Namespace) -> bool:
    """Whether stacks are to be validated in place of cases, be it with nothing behind ``--primitive``."""
    return options.stack is not None or "--primitive" in options.given or bool(options.primitive)


def describe_primitives(text: str, outputs: Outputs) -> int:
    """Say of each of these kinds of parallelism, or of all, what it saves and costs, and how it was validated."""
    names = PRIMITIVES if text.strip().lower() == "all" else [name.strip() for name in text.split(",")]
    chosen = [PRIMITIVES[find_primitive(name, among=PRIMITIVES)] for name in names]
    known = figures()
    for one in chosen:
        Terminal().say("\n".join(describe(one, known[one.name], Terminal().width)) + "\n")
    Terminal().detail(LEGEND)
    data = [as_data(one, known[one.name]) for one in chosen]
    return outputs.finish(0, primitives=data)


def validate_stacks(options: argparse.Namespace) -> int:
    """``validate`` with ``--primitive`` or ``--stack``, with a pipeline on every schedule that is asked for."""
    if options.stack is not None and ("--primitive" in options.given or options.primitive):
        raise UsageError("--primitive with --stack: expected one of the two; leave one out")
    what = "--stack" if options.stack is not None else "--primitive"
    useless = [*(f"--{name}" for name in OF_TABLE if name not in _SAID), "--config", "--profile", "--record"]
    refuse_unused(options, useless, f"with {what}, which runs a small decoder")
    microbatches = _MICROBATCHES if options.microbatches is None else options.microbatches
    check_count("microbatches", microbatches, most=MOST_MICROBATCHES)
    check_count("--seed", options.seed, least=0, most=MOST_SEED)
    schedules = schedule_names(options.schedule) if "--schedule" in options.given else [_SCHEDULE]
    if options.stack is not None:
        lines = [options.stack]
    else:
        every = options.primitive.strip().lower() == "all"
        lines = list(map(smallest_stack, PRIMITIVES if every else map(str.strip, options.primitive.split(","))))
    parse = partial(Stack.parse, microbatches=microbatches, seed=options.seed)
    piped = {line for line in lines if parse(line).has_pipeline}
    why = f"with {', '.join(lines)}, which has no pp"
    refuse_unused(options, ["--schedule", "--virtual"], why, where=not piped)
    stacks = list[Stack]()
    for line in lines:
        if line in piped:
            stacks += [parse(line, schedule=name, virtual=options.virtual) for name in schedules]
        else:
            stacks.append(parse(line, schedule=_SCHEDULE))
    return _validate(stacks, options, options.device)


def validate_config(options: argparse.Namespace, config: Config, stack: Stack) -> int:
    """``validate`` with a config of which ``stack`` is run. Its notes are said."""
    refuse_unused(options, ["--profile", "--record"], f"with {options.config}, which is run as a stack")
    tell_notes(config, stack)
    return _validate([stack], options, device_of(options, [config]))


def _validate(stacks: Sequence[Stack], options: argparse.Namespace, device: str) -> int:
    """Validate each, a line each; returns the exit status."""
    refuse_unused(options, ["--world"], "with parallel primitives, which run on real ranks")
    start_fork_server()
    from pipeproof.commands.campaign import CaseRun, Setting, run_all
    from pipeproof.whitebox import WhiteBox

    def judge(stack: Stack, world: "World") -> "Verdict":
        return validate_stack(stack, WhiteBox(world))

    def line(stack: Stack, verdict: "Verdict", width: int | None) -> str:
        cells = [str(stack), stack.schedule if stack.has_pipeline else "", str(stack.ranks), str(stack.microbatches)]
        counts = count_compared(verdict, "loss", "gradient", "replicas", "shards")
        return row(columns, [*cells, *counts, *outcome(verdict)], width)

    longest = max(len(str(stack)) for stack in stacks)
    columns = (Column("stack", longest + 1), *_FIGURES)  # which is never cut: it tells one from another
    runs = [CaseRun(str(one), one.ranks, partial(judge, one), partial(line, one)) for one in stacks]
    return run_all(runs, Setting.of(options, device=device), columns=columns)


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
