"""The command ``pipeproof``.

Exit status: 0 pass; 1 a wrong answer, or a broken law; 2 bad usage, invalid input, or no room for output; 3 no verdict
(a hang, a dead rank, something unknown, nothing exercised, interrupted); 141 where the reader of standard output has
stopped. What needs torch is imported by the commands that need it: ``show``, ``check`` and ``plan`` start at once.
Where ranks will run, the fork server imports its own torch meanwhile.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from pipeline.files import is_csv, read_file
from pipeline.laws import check
from pipeline.lower import Program
from pipeline.partition import parse_split
from pipeline.plan import Needs, plan, table, trade
from pipeline.schedule import Schedule
from pipeline.schedules import FAMILIES, LOOPED
from pipeline.simulate import Times
from pipeline.sizes import MOST_ACTIONS, MOST_PROCESSES, MOST_SEED, counted
from validation.case import DTYPES, FUZZED_DTYPES, LOSSES, MODELS, SCHEDULES, Case, CaseError, most_stages
from validation.commands.checking import checked
from validation.commands.drawings import Paths
from validation.commands.fault_commands import add_fault_commands
from validation.commands.record_commands import add_record_commands
from validation.commands.selection import (
    MICROBATCHES,
    RANKS,
    Shape,
    dtype_names,
    schedule_in,
    schedule_names,
    selected,
)
from validation.commands.show import show
from validation.console.ending import WRONG, ended
from validation.console.option_parser import OptionParser, joined
from validation.console.option_types import number, numbers, seconds, share, shares, three_numbers
from validation.console.terminal import Terminal
from validation.ranks import fork_server
from validation.runtimes import OWN, TORCH

_UNIT = (1.0, 1.0, 1.0)
_MODELS = f"out of {', '.join(MODELS)}"
_DTYPES = f"out of {', '.join(DTYPES)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return ended(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    given = joined(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    options.arguments = given
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="pipeproof",
        description="Runs pipeline schedules on real ranks beside a single-device reference.",
        epilog=_STATUSES,
    )
    parser.add_argument("--version", action="version", version=f"pipeproof {version('pipeproof')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_validate(
        commands.add_parser(
            "validate",
            help="run schedules beside the reference and compare everything",
            description="By default: every schedule, on 4 ranks, with a GPT and with one whose weights are tied.",
            epilog=_STATUSES,
        )
    )
    _add_fuzz(commands.add_parser("fuzz", help="run many random cases; a failure shrinks to a line that replays it"))
    _add_gate(
        commands.add_parser(
            "gate", help="decide a merge: the table of schedules, fuzzing, and a planted fault", epilog=_STATUSES
        )
    )
    replay = commands.add_parser("replay", help="run one case again", epilog=_STATUSES)
    replay.add_argument("case", help='the line that a failure printed, e.g. "1f1b r4 s4 m8 split=2,2,2,2 seed=17"')
    replay.add_argument("--json", metavar="FILE", help="write the verdict there")
    replay.set_defaults(run=_replay)
    _add_recording(replay)
    add_record_commands(commands)
    shower = commands.add_parser("show", help="draw a schedule; bubbles and memory")
    shower.add_argument("schedule", help=f"one of {', '.join(FAMILIES)}, or a FILE.csv")
    _add_shape(shower)
    _add_drawing(shower)
    shower.set_defaults(run=_show)
    checker = commands.add_parser(
        "check", help="check a schedule or a program in torch's CSV format against every law", epilog=_STATUSES
    )
    checker.add_argument("file", help="a FILE.csv, or - for standard input")
    checker.set_defaults(run=_check)
    add_fault_commands(commands)
    _add_plan(commands.add_parser("plan", help="which schedule: time, bubble, memory and messages of all, best first"))
    return parser


_STATUSES = (
    "Exit status: 0 pass; 1 a wrong answer, or a broken law; 2 bad usage, invalid input, or no room for output; "
    "3 no verdict: a hang, a dead rank, something unknown, an interruption."
)


def _add_drawing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=three_numbers, metavar="F,I,W", help="of a stage (default 1,1,1)")
    parser.add_argument("--svg", metavar="FILE", help="draw the timeline (needs the extra 'plot')")
    parser.add_argument("--png", metavar="FILE", help="draw the timeline (needs the extra 'plot')")
    parser.add_argument("--trace", metavar="FILE.json", help="write the timeline for ui.perfetto.dev: Chrome's format")
    parser.add_argument("--run", dest="real", action="store_true", help="time it on ranks too, with a small model")
    real = parser.add_argument_group("with --run", argument_default=argparse.SUPPRESS)
    real.add_argument("--steps", type=int, metavar="N", help="how many are timed (default 5)")
    real.add_argument("--model", metavar="NAME", help=f"{_MODELS} (default gpt)")
    real.add_argument("--layers", type=int, metavar="L", help="layers of the model (default 8)")
    real.add_argument("--split", help="layers per stage: even, or sizes such as 3,1,2,2")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=RANKS, metavar="P", help="(default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES, metavar="M", help="(default %(default)s)")
    parser.add_argument(
        "--memory",
        type=number,
        help="the most that a rank may hold, in activations of one microbatch on a whole rank, or as --activations",
    )
    parser.add_argument(
        "--times", type=three_numbers, default=_UNIT, metavar="F,I,W", help="of a whole rank (default 1,1,1)"
    )
    parser.add_argument(
        "--layers",
        type=numbers,
        default=(),
        metavar="C,C,...",
        help="cost of every layer: stages are balanced by it",
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
        type=shares,
        default=(),
        metavar="W,W,...",
        help="what stays on every layer, in the same unit: parameters, gradients, the optimizer's state",
    )
    parser.add_argument(
        "--weight-memory",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="of an activation, held from I to W (default 1)",
    )
    parser.set_defaults(run=_plan)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="P", help=f"(default {RANKS})")
    parser.add_argument(
        "--virtual", type=int, metavar="V", help=f"stages per rank, for {', '.join(sorted(LOOPED))} (default 2)"
    )
    parser.add_argument("--microbatches", type=int, metavar="M", help=f"(default {MICROBATCHES})")


def _add_validate(parser: argparse.ArgumentParser) -> None:
    _add_table(parser)
    parser.add_argument("--profile", action="store_true", help="print where each rank's time went")
    _add_recording(parser)
    _add_world(parser)
    parser.set_defaults(run=_validate)


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schedule",
        default="all",
        metavar="NAME,...",
        help=f"all, or out of {', '.join(SCHEDULES)}, or a FILE.csv, whose ranks, stages and microbatches are its own",
    )
    _add_shape(parser)
    parser.add_argument("--layers", type=int, default=8, metavar="L", help="layers of the model (default 8)")
    parser.add_argument("--split", default="even", help="layers per stage: even, or sizes such as 3,1,2,2")
    parser.add_argument("--model", default="gpt,gpt-tied", metavar="NAME,...", help=f"{_MODELS} (default %(default)s)")
    parser.add_argument("--dtype", default="fp32", metavar="NAME,...", help=f"{_DTYPES} (default %(default)s)")
    parser.add_argument("--loss", choices=LOSSES, default="mean", help="mean over microbatches, or sum over tokens")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")


def _add_gate(parser: argparse.ArgumentParser) -> None:
    _add_table(parser)
    parser.add_argument("--cases", type=int, default=50, metavar="N", help="how many are drawn from the seed")
    parser.add_argument("--case", action="append", default=[], metavar="LINE", help="one more case, as for replay")
    parser.add_argument("--max-ranks", type=int, metavar="P", help="of drawn cases (default: as in the table)")
    parser.add_argument("--junit", metavar="FILE", help="write a test report there")
    parser.add_argument("--summary", metavar="FILE", help="write a table in Markdown there")
    parser.add_argument("--artifacts", metavar="DIR", help="leave the records of failing cases there")
    parser.add_argument("--annotations", choices=("github",), help="print what is wrong so that GitHub shows it")
    _add_world(parser)
    parser.set_defaults(run=_gate)


def _add_fuzz(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=200, metavar="N", help="how many (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--schedule", default="all", metavar="NAME,...", help="(default %(default)s)")
    drawn = ",".join(FUZZED_DTYPES)
    parser.add_argument("--dtype", default=drawn, metavar="NAME,...", help=f"{_DTYPES} (default %(default)s)")
    parser.add_argument("--max-ranks", type=int, default=4, metavar="P", help="(default %(default)s)")
    parser.add_argument(
        "--runtime",
        choices=(OWN, TORCH),
        default=OWN,
        help="whose: torch is torch.distributed.pipelining (default %(default)s)",
    )
    _add_world(parser)
    parser.set_defaults(run=_fuzz)


def _add_recording(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", metavar="FILE", help="write there what the ranks gave, for compare and diff")


def _add_world(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--timeout", type=seconds, default=120.0, metavar="SECONDS", help="of one case (default 120)")
    parser.add_argument("--json", metavar="FILE", help="write verdicts there")


def _validate(options: argparse.Namespace) -> int:
    cases, left_out = _table(options)
    fork_server.start()
    from validation.commands.campaign import Setting, validate_all

    setting = Setting(options.device, options.timeout, options.json, options.profile, record=options.record)
    return validate_all(cases, setting, left_out=left_out)


def _table(options: argparse.Namespace) -> tuple[list[Case], Mapping[str, str]]:
    """The cases that options of ``_add_table`` ask for, and why others cannot be."""
    shape = Shape(options.ranks, options.microbatches, options.virtual)
    found = selected(options.schedule, shape, fits=lambda stages: _split(options, stages))
    cases = [
        _case(options, name, schedule, model, dtype)
        for dtype in dtype_names(options.dtype)
        for model in options.model.split(",")
        for name, schedule in found.chosen.items()
    ]
    return cases, found.left_out


def _gate(options: argparse.Namespace) -> int:
    table, missing = _table(options)
    fork_server.start()
    from validation.commands.campaign import Setting
    from validation.gate.gate import Plan, Reports, gate

    max_ranks = max(case.ranks for case in table) if options.max_ranks is None else options.max_ranks
    counted("--cases", options.cases, least=0, most=MOST_ACTIONS)
    counted("--max-ranks", max_ranks, most=MOST_PROCESSES)
    counted("--seed", options.seed, least=0, most=MOST_SEED)
    families = ",".join(name for name in options.schedule.split(",") if not is_csv(name))
    if options.cases and not families:
        raise CaseError(f"--cases {options.cases} are drawn from families, and --schedule names none: give --cases 0")
    plan = Plan(
        table,
        [Case.parse(text) for text in options.case],
        schedule_names(families) if families else [],
        options.cases,
        options.seed,
        max_ranks,
        missing,
    )
    reports = Reports(options.junit, options.summary, options.artifacts, options.annotations == "github")
    return gate(plan, Setting(options.device, options.timeout, options.json), reports)


def _fuzz(options: argparse.Namespace) -> int:
    counted("--cases", options.cases, most=MOST_ACTIONS)
    counted("--max-ranks", options.max_ranks, most=MOST_PROCESSES)
    counted("--seed", options.seed, least=0, most=MOST_SEED)
    schedules, dtypes = schedule_names(options.schedule), dtype_names(options.dtype)
    fork_server.start()
    from validation.commands.campaign import Setting, fuzz_all

    return fuzz_all(
        Setting(options.device, options.timeout, options.json),
        budget=options.cases,
        seed=options.seed,
        schedules=schedules,
        dtypes=dtypes,
        max_ranks=options.max_ranks,
        runtime=options.runtime,
    )


def _replay(options: argparse.Namespace) -> int:
    case = Case.parse(options.case)
    fork_server.start()
    from validation.commands.campaign import Setting, validate_all

    return validate_all([case], Setting(case.device, json=options.json, explain=True, record=options.record))


def _show(options: argparse.Namespace) -> int:
    shape = Shape(options.ranks, options.microbatches, options.virtual)
    with Terminal().progress(f"show {options.schedule}"):
        found = read_file(options.schedule) if is_csv(options.schedule) else shape.family(options.schedule)
        schedule = check(schedule_in(found))
    if is_csv(options.schedule):
        shape.agree(options.schedule, schedule)
    paths = Paths(options.svg, options.png, options.trace)
    if options.real:
        return _show_real(argparse.Namespace(**(_REAL | vars(options))), found, paths)
    for name in _REAL.keys() & vars(options).keys():
        raise ValueError(f"--{name} says how ranks run: it needs --run")
    with Terminal().progress(f"show {options.schedule}"):
        text = show(schedule, Times(*(options.times or _UNIT)), paths)
    print(f"{schedule.name}: {schedule.sizes}")
    print(text)
    return 0


# What --run takes where nothing is said.
_REAL = {"steps": 5, "model": "gpt", "layers": 8, "split": "even", "loss": "mean", "seed": 0}


def _show_real(options: argparse.Namespace, found: Schedule | Program, paths: Paths) -> int:
    if options.times is not None:
        raise ValueError("--times with --run: expected one of the two, for a run measures times")
    fork_server.start()
    from validation.commands.measure import show_measured

    name = options.schedule if is_csv(options.schedule) else schedule_in(found).name
    return show_measured(_case(options, name, found, options.model, "fp32"), paths, steps=options.steps)


def _check(options: argparse.Namespace) -> int:
    with Terminal().progress(f"check {options.file}"):
        text, free = checked(read_file(options.file))
    print(text)
    return 0 if free else WRONG


def _plan(options: argparse.Namespace) -> int:
    if len(options.layers) == 1:
        raise CaseError(f"--layers {options.layers[0]:g}: expected the costs of all layers, e.g. 1,1,1,1")
    needs = Needs(
        options.ranks,
        options.microbatches,
        options.memory,
        options.times,
        options.layers,
        options.weight_memory,
        options.activations,
        options.weights,
    )
    with Terminal().progress("plan") as show_progress:
        found = plan(needs, progress=lambda name: show_progress(f"plan: {name}"))
    print(table(found))
    print(trade(found))
    return 0 if any(not option.fails for option in found) else 1


def _split(options: argparse.Namespace, stages: int) -> tuple[int, ...]:
    return parse_split(options.split, layers=options.layers, stages=stages)


def _case(options: argparse.Namespace, name: str, found: Schedule | Program, model: str, dtype: str) -> Case:
    schedule = schedule_in(found)
    return Case(
        name,
        schedule.n_ranks,
        most_stages(schedule),
        schedule.microbatches,
        _split(options, schedule.n_stages),
        model=model.strip(),
        dtype=dtype,
        loss=options.loss,
        ragged=True,
        unequal=True,
        seed=options.seed,
        own=found if is_csv(name) else None,
    )
