"""What commands that run cases have in common: a schedule's shape, the table of cases, how ranks run."""

import argparse
from collections.abc import Mapping

from pipeline.files import is_csv
from pipeline.lower import Program
from pipeline.partition import parse_split
from pipeline.schedule import Schedule
from pipeline.schedules import LOOPED
from validation.cases.case import DTYPES, LOSSES, MODELS, SCHEDULES, Case, most_stages
from validation.commands.option_types import seconds
from validation.commands.selection import MICROBATCHES, RANKS, Shape, dtype_names, schedule_in, selected

MODEL_NAMES = f"out of {', '.join(MODELS)}"
DTYPE_NAMES = f"out of {', '.join(DTYPES)}"
STATUSES = (
    "Exit status: 0 pass; 1 a wrong answer, or a broken law; 2 bad usage, invalid input, or no room for output; "
    "3 no verdict: a hang, a dead rank, something unknown, an interruption."
)


def add_shape(parser: argparse.ArgumentParser) -> None:
    """How many ranks, stages and microbatches a family of schedules is built for."""
    parser.add_argument("--ranks", type=int, metavar="P", help=f"(default {RANKS})")
    parser.add_argument(
        "--virtual", type=int, metavar="V", help=f"stages per rank, for {', '.join(sorted(LOOPED))} (default 2)"
    )
    parser.add_argument("--microbatches", type=int, metavar="M", help=f"(default {MICROBATCHES})")


def add_table(parser: argparse.ArgumentParser) -> None:
    """Which cases: schedules, models and dtypes, each with each."""
    parser.add_argument(
        "--schedule",
        default="all",
        metavar="NAME,...",
        help=f"all, or out of {', '.join(SCHEDULES)}, or a FILE.csv, whose ranks, stages and microbatches are its own",
    )
    add_shape(parser)
    parser.add_argument("--layers", type=int, default=8, metavar="L", help="layers of the model (default 8)")
    parser.add_argument("--split", default="even", help="layers per stage: even, or sizes such as 3,1,2,2")
    parser.add_argument(
        "--model", default="gpt,gpt-tied", metavar="NAME,...", help=f"{MODEL_NAMES} (default %(default)s)"
    )
    parser.add_argument("--dtype", default="fp32", metavar="NAME,...", help=f"{DTYPE_NAMES} (default %(default)s)")
    parser.add_argument("--loss", choices=LOSSES, default="mean", help="mean over microbatches, or sum over tokens")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")


def add_recording(parser: argparse.ArgumentParser) -> None:
    """Where what the ranks gave is kept."""
    parser.add_argument("--record", metavar="FILE", help="write there what the ranks gave, for compare and diff")


def add_world(parser: argparse.ArgumentParser) -> None:
    """Where ranks run, how long, and where verdicts go."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--timeout", type=seconds, default=120.0, metavar="SECONDS", help="of one case (default 120)")
    parser.add_argument("--json", metavar="FILE", help="write verdicts there")


def table_of(options: argparse.Namespace) -> tuple[list[Case], Mapping[str, str]]:
    """The cases that options of ``add_table`` ask for, and why others cannot be."""
    shape = Shape(options.ranks, options.microbatches, options.virtual)
    found = selected(options.schedule, shape, fits=lambda stages: _split(options, stages))
    cases = [
        case_of(options, name, schedule, model, dtype)
        for dtype in dtype_names(options.dtype)
        for model in options.model.split(",")
        for name, schedule in found.chosen.items()
    ]
    return cases, found.left_out


def case_of(options: argparse.Namespace, name: str, found: Schedule | Program, model: str, dtype: str) -> Case:
    """The case of one schedule, one model and one dtype; ``name`` is the family's, or the file's."""
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


def _split(options: argparse.Namespace, stages: int) -> tuple[int, ...]:
    return parse_split(options.split, layers=options.layers, stages=stages)
