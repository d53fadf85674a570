"""The command ``pipeproof``.

Exit status: 0 pass; 1 a wrong answer, or a broken law; 2 bad usage or invalid input; 3 no verdict (a hang, a dead rank,
something unknown, nothing exercised). What needs torch is imported by the commands that need it: ``show``,
``check`` and ``plan`` start at once.
"""

import argparse
import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from pipeline.files import is_csv, read_file
from pipeline.laws import LawBroken, check
from pipeline.lower import Program
from pipeline.partition import parse_split
from pipeline.plan import Needs, plan, table, trade
from pipeline.schedule import Schedule
from pipeline.schedules import FAMILIES, LOOPED, canonical_name
from pipeline.simulate import Times
from validation.case import LOSSES, SCHEDULES, Case, CaseError, most_stages
from validation.checking import checked
from validation.drawings import Paths
from validation.selection import Shape, selected
from validation.show import show

WRONG, BAD_INPUT, NO_VERDICT = 1, 2, 3
_LAST_WORDS_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()  # a full disk is noticed here, not after the status is settled
    except LawBroken as error:
        status = _report(str(error))
    except ValueError as error:  # every error of ours about input is one
        status = _refuse(str(error))
    except KeyboardInterrupt:
        status = _refuse("interrupted", status=NO_VERDICT)
    except Exception as error:  # ours to mend, and never to be taken for a wrong answer
        traceback.print_exc()
        status = _refuse(f"a fault in pipeproof itself: {error!r}; please report it", status=NO_VERDICT)
    if status != 0 and os.environ.get("RANK", "0") != "0":
        # A launcher ends all ranks as soon as one ends badly; rank 0 is the one that says why.
        time.sleep(_LAST_WORDS_S)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipeproof", description="Runs pipeline schedules on real ranks beside a single-device reference."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_validate(commands.add_parser("validate", help="run schedules beside the reference and compare everything"))
    _add_fuzz(commands.add_parser("fuzz", help="run many random cases; a failure shrinks to a line that replays it"))
    replay = commands.add_parser("replay", help="run one case again")
    replay.add_argument("case", help='the line that a failure printed, e.g. "1f1b r4 s4 m8 split=2,2,2,2 seed=17"')
    replay.add_argument("--json", metavar="FILE", help="write the verdict there")
    replay.set_defaults(run=_replay)
    shower = commands.add_parser("show", help="draw a schedule; bubbles and memory")
    shower.add_argument("schedule", help=f"one of {', '.join(FAMILIES)}, or a FILE.csv")
    _add_shape(shower)
    _add_drawing(shower)
    shower.set_defaults(run=_show)
    checker = commands.add_parser("check", help="check a schedule or a program in torch's CSV format against every law")
    checker.add_argument("file", type=Path)
    checker.set_defaults(run=_check)
    _add_specimens(commands.add_parser("specimens", help="plant known faults; see that each is caught and named"))
    _add_plan(commands.add_parser("plan", help="which schedule: time, bubble, memory and messages of all, best first"))
    return parser


def _add_drawing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=numbers, metavar="F,I,W", help="of a stage (default 1,1,1)")
    parser.add_argument("--svg", metavar="FILE", help="draw the timeline (needs the extra 'plot')")
    parser.add_argument("--png", metavar="FILE", help="draw the timeline (needs the extra 'plot')")
    parser.add_argument("--trace", metavar="FILE.json", help="write the timeline for ui.perfetto.dev: Chrome's format")
    parser.add_argument("--run", dest="real", action="store_true", help="time it on ranks too, with a small model")
    real = parser.add_argument_group("with --run", argument_default=argparse.SUPPRESS)
    real.add_argument("--steps", type=int, metavar="N", help="how many are timed (default 5)")
    real.add_argument("--model", metavar="NAME", help="(default gpt)")
    real.add_argument("--layers", type=int, metavar="L", help="layers of the model (default 8)")
    real.add_argument("--split", help="layers per stage: even, or sizes such as 3,1,2,2")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=4, metavar="P")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M")
    parser.add_argument(
        "--memory",
        type=float,
        help="the most that a rank may hold, in activations of one microbatch on a whole rank, or as --activations",
    )
    parser.add_argument("--times", type=numbers, default=(1.0, 1.0, 1.0), metavar="F,I,W", help="of a whole rank")
    parser.add_argument(
        "--layers", type=numbers, default=(), metavar="C,C,...", help="cost of every layer: stages are balanced by it"
    )
    parser.add_argument(
        "--activations",
        type=numbers,
        default=(),
        metavar="A,A,...",
        help="what a microbatch leaves on every layer, e.g. in MiB: then --memory is in MiB, and includes the weights",
    )
    parser.add_argument(
        "--weights",
        type=numbers,
        default=(),
        metavar="W,W,...",
        help="what stays on every layer, in the same unit: parameters, gradients, the optimizer's state",
    )
    parser.add_argument(
        "--weight-memory", type=float, default=1.0, metavar="SHARE", help="of an activation, held from I to W"
    )
    parser.set_defaults(run=_plan)


def numbers(text: str) -> tuple[float, ...]:
    """``1,2.5`` as numbers; argparse names this function where it fails."""
    return tuple(map(float, text.split(",")))


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=4, metavar="P")
    parser.add_argument(
        "--virtual", type=int, metavar="V", help=f"stages per rank, for {', '.join(sorted(LOOPED))} (default 2)"
    )
    parser.add_argument("--microbatches", type=int, default=8, metavar="M")


def _add_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schedule",
        default="all",
        metavar="NAME,...",
        help=f"all, or out of {', '.join(SCHEDULES)}, or a FILE.csv, whose ranks, stages and microbatches are its own",
    )
    _add_shape(parser)
    parser.add_argument("--layers", type=int, default=8, metavar="L", help="layers of the model")
    parser.add_argument("--split", default="even", help="layers per stage: even, or sizes such as 3,1,2,2")
    parser.add_argument("--model", default="gpt,gpt-tied", metavar="NAME,...")
    parser.add_argument("--loss", choices=LOSSES, default="mean", help="mean over microbatches, or sum over tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="print where each rank's time went")
    _add_world(parser)
    parser.set_defaults(run=_validate)


def _add_fuzz(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=200, metavar="N", help="how many; a budget of cases, not of time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedule", default="all", metavar="NAME,...")
    parser.add_argument("--max-ranks", type=int, default=4, metavar="P")
    _add_world(parser)
    parser.set_defaults(run=_fuzz)


def _add_specimens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="one line for each, without running anything")
    parser.add_argument(
        "--schedule", default="", metavar="NAME,...", help="all, or some: each specimen there, not in its smallest case"
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help="these specimens alone")
    parser.add_argument("--shrink", action="store_true", help="shrink a random failing case of each to its smallest")
    parser.add_argument("--seed", type=int, default=0, help="where --shrink begins")
    parser.add_argument("--final-only", action="store_true", help="from final gradients alone: record no tensors")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="bound of one case")
    parser.add_argument("--json", metavar="FILE", help="write results there")
    parser.set_defaults(run=_specimens)


def _add_world(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="bound of one case")
    parser.add_argument("--json", metavar="FILE", help="write verdicts there")


def _validate(options: argparse.Namespace) -> int:
    from validation.campaign import Setting, validate_all

    shape = Shape(options.ranks, options.microbatches, options.virtual)
    found = selected(options.schedule, shape, fits=lambda schedule: _split(options, schedule))
    cases = [
        _case(options, name, schedule, model)
        for model in options.model.split(",")
        for name, schedule in found.chosen.items()
    ]
    setting = Setting(options.device, options.timeout, options.json, options.profile)
    return validate_all(cases, setting, left_out=found.left_out)


def _fuzz(options: argparse.Namespace) -> int:
    from validation.campaign import Setting, fuzz_all

    for what, value in (("--cases", options.cases), ("--max-ranks", options.max_ranks)):
        if value < 1:
            raise CaseError(f"{what} is {value}: expected at least 1")
    return fuzz_all(
        Setting(options.device, options.timeout, options.json),
        budget=options.cases,
        seed=options.seed,
        schedules=_schedules(options.schedule),
        max_ranks=options.max_ranks,
    )


def _replay(options: argparse.Namespace) -> int:
    from validation.campaign import Setting, validate_all

    case = Case.parse(options.case)
    return validate_all([case], Setting(case.device, json=options.json, explain=True))


def _specimens(options: argparse.Namespace) -> int:
    from validation.campaign import Setting
    from validation.catalogue import chosen, listing, shrink_all, try_all

    names = chosen(options.only)
    if options.list:
        print(listing(names))
        return 0
    schedules = _schedules(options.schedule) if options.schedule else []
    setting = Setting("cpu", options.timeout, options.json)
    if options.shrink:
        return shrink_all(names, setting, seed=options.seed)
    return try_all(names, schedules, setting, final_only=options.final_only)


def _show(options: argparse.Namespace) -> int:
    found = read_file(options.schedule) if is_csv(options.schedule) else _built(options.schedule, options)
    schedule = check(_schedule_of(found))
    paths = Paths(options.svg, options.png, options.trace)
    if options.real:
        return _show_real(argparse.Namespace(**(_REAL | vars(options))), found, paths)
    for name in _REAL.keys() & vars(options).keys():
        raise ValueError(f"--{name} says how ranks run: it needs --run")
    text = show(schedule, Times(*_three(options.times or (1.0, 1.0, 1.0))), paths)
    print(f"{schedule.name}: {_sizes(schedule)}")
    print(text)
    return 0


# What --run takes where nothing is said.
_REAL = {"steps": 5, "model": "gpt", "layers": 8, "split": "even", "loss": "mean", "seed": 0}


def _show_real(options: argparse.Namespace, found: Schedule | Program, paths: Paths) -> int:
    from validation.measure import show_measured

    if options.times is not None:
        raise ValueError("--times with --run: expected one of the two, for a run measures times")
    name = options.schedule if is_csv(options.schedule) else _schedule_of(found).name
    return show_measured(_case(options, name, found, options.model), paths, steps=options.steps)


def _check(options: argparse.Namespace) -> int:
    text, free = checked(read_file(options.file))
    print(text)
    return 0 if free else WRONG


def _plan(options: argparse.Namespace) -> int:
    found = plan(
        Needs(
            options.ranks,
            options.microbatches,
            options.memory,
            _three(options.times),
            options.layers,
            options.weight_memory,
            options.activations,
            options.weights,
        )
    )
    print(table(found))
    print(trade(found))
    return 0 if any(not option.fails for option in found) else 1


def _three(times: Sequence[float]) -> tuple[float, float, float]:
    if len(times) != 3:
        raise ValueError("--times needs three numbers, T_F, T_I and T_W, e.g. 1,1,1")
    f, i, w = times
    if not all(0 < time < math.inf for time in times):
        raise ValueError(f"--times {f:g},{i:g},{w:g}: expected numbers above 0, e.g. 1,1,1")
    return f, i, w


def _schedule_of(found: Schedule | Program) -> Schedule:
    return found.schedule if isinstance(found, Program) else found


def _split(options: argparse.Namespace, schedule: Schedule) -> tuple[int, ...]:
    return parse_split(options.split, layers=options.layers, stages=schedule.n_stages)


def _case(options: argparse.Namespace, name: str, found: Schedule | Program, model: str) -> Case:
    schedule = _schedule_of(found)
    return Case(
        name,
        schedule.n_ranks,
        most_stages(schedule),
        schedule.microbatches,
        _split(options, schedule),
        model=model.strip(),
        loss=options.loss,
        ragged=True,
        unequal=True,
        seed=options.seed,
        own=found if is_csv(name) else None,
    )


def _schedules(text: str) -> list[str]:
    return list(SCHEDULES) if text == "all" else [canonical_name(name) for name in text.split(",")]


def _built(name: str, options: argparse.Namespace) -> Schedule:
    return Shape(options.ranks, options.microbatches, options.virtual).family(name)


def _sizes(schedule: Schedule) -> str:
    return f"{schedule.n_ranks} ranks, {schedule.n_stages} stages, {schedule.microbatches} microbatches"


def _report(text: str) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(text)
    return WRONG


def _refuse(message: str, *, status: int = BAD_INPUT) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"pipeproof: {message}", file=sys.stderr)
    return status
