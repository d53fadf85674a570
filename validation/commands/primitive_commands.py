"""``primitives``: every kind of parallelism, with what it saves and costs; ``validate --primitive`` and ``--stack``."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from pipeproof.cases.config import Config
from pipeproof.cases.primitives.figures import Figures, figures
from pipeproof.cases.primitives.primitive import PRIMITIVES, SYMBOLS, VARIANTS, Primitive
from pipeproof.cases.primitives.stacks import ONE_DEVICE, Stack, alone, known_primitive
from pipeproof.commands.option_parser import UsageError, add_names, offers, without_effect
from pipeproof.commands.outputs import Outputs, add_outputs
from pipeproof.commands.selection import OF_TABLE, device_of, schedule_names, tell_notes
from pipeproof.core.mismatch import small
from pipeproof.pipeline.sizes import MOST_MICROBATCHES, MOST_SEED, counted, some
from pipeproof.reports.columns import Column, table
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.launcher import start_fork_server

_SAID = ("schedule", "virtual", "microbatches", "seed")  # what a stack takes of the options that say which case
_NAMES = max(map(len, PRIMITIVES)) + 2  # the width of their column
_MICROBATCHES, _SCHEDULE = 4, "1f1b"


def add_primitives_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command."""
    about = "every kind of parallelism: what it saves and costs, what implements it, how it was validated"
    parser = commands.add_parser("primitives", help=about)
    named = parser.add_argument("name", nargs="*", help="show only these (default: all)")
    offers(named, PRIMITIVES)
    add_outputs(parser, what="the table")
    parser.set_defaults(run=_primitives)


def add_stacks(parser: argparse.ArgumentParser) -> None:
    """What is validated in place of a case: primitives."""
    known = [*PRIMITIVES, *VARIANTS]
    each = f"kinds of parallelism, each alone on a small decoder: all, or some of {', '.join(known)}"
    add_names(parser, "--primitive", each, known=("all", *known))
    together = f"several kinds together, with the number of ranks of each: pp=2,tp=2,ddp=2; or {ONE_DEVICE}"
    parser.add_argument("--stack", metavar="NAME=N,...", help=together)


def asks_for_primitives(options: argparse.Namespace) -> bool:
    """Whether ``--primitive`` is said, be it with nothing behind it."""
    return bool(options.primitive) or "--primitive" in options.given


def _primitives(options: argparse.Namespace) -> int:
    chosen = [PRIMITIVES[known_primitive(name, among=PRIMITIVES)] for name in options.name] or PRIMITIVES.values()
    known = figures()
    with Outputs.of(options).opened("primitives") as files:
        for one in chosen:
            Terminal().say("\n".join(_lines(one, known[one.name])) + "\n")
        Terminal().detail(_legend())
        data = [_data(one, known[one.name]) for one in chosen]
        return files.finish(0, primitives=data)


def _lines(one: Primitive, found: Figures) -> Iterator[str]:
    yield f"{one.name:<{_NAMES}}{one.title}"
    rows = [
        ("  saves", " ".join(one.saves)),
        ("  costs", " ".join(one.costs)),
        ("  by", one.implementation),
        ("  here", _validated(found)),
        ("  source", one.source),
    ]
    yield table([Column(""), Column("")], rows, Terminal().width)


def _validated(found: Figures) -> str:
    """How it was validated."""
    ran = f"{found.passed} of {found.seeds} seeds pass on {some(found.ranks, 'rank')}, torch {found.torch}"
    worst = f"worst error {small(found.worst)}, rounding {small(found.floor)}" if found.worst else "bit for bit"
    return f"{ran}: {found.parameters} gradients each, {worst}"


def _legend() -> str:
    symbols = "\n".join(f"  {letter} {what}" for letter, what in SYMBOLS.items())
    return (
        f"{symbols}\nBytes: 2 a weight, 4 a gradient, 12 for Adam.\n"
        "`pipeproof validate --primitive tp` runs one; `--stack pp=2,tp=2,ddp=2` runs several together."
    )


def _data(one: Primitive, found: Figures) -> dict[str, object]:
    return {
        "name": one.name,
        "title": one.title,
        "axes": list(one.axes),
        **{what: {"formula": text, "of": of} for what, (text, of) in (("saves", one.saves), ("costs", one.costs))},
        "implementation": one.implementation,
        "source": one.source,
        "validated": asdict(found),
    }


def validate_stacks(options: argparse.Namespace) -> int:
    """``validate`` with ``--primitive`` or ``--stack``."""
    if asks_for_primitives(options) and options.stack is not None:
        raise UsageError("--primitive with --stack: expected one of the two; leave one out")
    what = "--stack" if options.stack is not None else "--primitive"
    useless = [f"--{name}" for name in OF_TABLE if name not in _SAID]
    without_effect(options, [*useless, "--config", "--profile", "--record"], f"with {what}, which runs a small decoder")
    return _validate(list(stacks_of(options)), options, options.device)


def validate_config(options: argparse.Namespace, config: Config, stack: Stack) -> int:
    """``validate`` with a config of which ``stack`` is run. Its notes are told."""
    without_effect(options, ["--profile", "--record"], f"with {options.config}, which is run as a stack")
    tell_notes(config, stack)
    return _validate([stack], options, device_of(options, [config]))


def _validate(stacks: Sequence[Stack], options: argparse.Namespace, device: str) -> int:
    start_fork_server()
    from pipeproof.commands.campaign import Setting
    from pipeproof.commands.stack_runs import run_stacks

    return run_stacks(stacks, Setting(device, options.timeout, Outputs.of(options)))


def stacks_of(options: argparse.Namespace) -> Iterator[Stack]:
    """Those that are asked for, with a pipeline on every schedule. Raises ``StackError`` or ``ScheduleError``."""
    microbatches = _MICROBATCHES if options.microbatches is None else options.microbatches
    counted("microbatches", microbatches, most=MOST_MICROBATCHES)
    counted("--seed", options.seed, least=0, most=MOST_SEED)
    schedules = schedule_names(options.schedule) if "--schedule" in options.given else [_SCHEDULE]
    lines = _lines_of(options)
    found = [Stack.parse(line, microbatches=microbatches, seed=options.seed) for line in lines]
    piped = any(stack.has_pipeline for stack in found)
    without_effect(options, () if piped else ["--schedule", "--virtual"], f"with {', '.join(lines)}, which has no pp")
    for line, stack in zip(lines, found, strict=True):
        for name in schedules if stack.has_pipeline else [_SCHEDULE]:
            virtual = options.virtual if stack.has_pipeline else None
            yield Stack.parse(line, schedule=name, virtual=virtual, microbatches=microbatches, seed=options.seed)


def _lines_of(options: argparse.Namespace) -> list[str]:
    """What was asked for, as lines of stacks."""
    if options.stack is not None:
        return [options.stack]
    every = options.primitive.strip().lower() == "all"
    return list(map(alone, PRIMITIVES if every else map(str.strip, options.primitive.split(","))))
