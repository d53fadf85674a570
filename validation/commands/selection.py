"""Which schedules a command line asks for: families by name, files, or all families that can be."""

import argparse
from collections.abc import Callable, Mapping, Sequence

from pipeproof.commands.option_parser import add, refuse_unused, whole
from pipeproof.commands.own_step import count_or_place
from pipeproof.commands.work import Work, notes_of
from pipeproof.own.case import DTYPES, LOSSES, MODELS, SCHEDULES, Case, CaseError, most_stages
from pipeproof.own.config import Config, read_config
from pipeproof.own.shapes import MICROBATCHES, RANKS, Shape, schedule_in, select_names
from pipeproof.pipeline.files import is_csv
from pipeproof.pipeline.partition import parse_split
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import LOOPED, canonical_name, list_known
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.accelerator import AUTO, COMMON, parse_device
from pipeproof.worlds.timeout import parse_seconds

COMPOSED = "composed"  # of --check: steps are held against themselves


def schedule_names(text: str) -> list[str]:
    """``all``, or names of families, as those of the families."""
    return list(SCHEDULES) if text.strip().lower() == "all" else [canonical_name(name) for name in text.split(",")]


def dtype_names(text: str) -> list[str]:
    """The dtypes in ``text``. Raises ``CaseError`` for an unknown one."""
    found = [name.strip() for name in text.split(",")]
    for name in found:
        if name not in DTYPES:
            raise CaseError(f"--dtype {text}: unknown dtype {name!r}: {list_known(name, DTYPES)}")
    return found


DTYPE_NAMES = f"some of {', '.join(DTYPES)}"


def add_shape(parser: argparse.ArgumentParser, *, of_steps: bool = False) -> None:
    """How many ranks, stages and microbatches a family of schedules is built for; ``of_steps``: or a user's step."""
    add(parser, "--ranks", "P", f"how many ranks (default {RANKS})", whole)
    add(parser, "--virtual", "V", f"stages per rank, for {', '.join(sorted(LOOPED))} (default 2)", whole, rare=True)
    kind: Callable[[str], int | str] = count_or_place if of_steps else whole
    own = "; of a step of yours, what makes them" if of_steps else " microbatches"
    add(parser, "--microbatches", "M", f"how many{own} (default {MICROBATCHES})", kind)


def add_layers(parser: argparse._ActionsContainer) -> None:
    """How many layers a model has, and how stages share them."""
    add(parser, "--layers", "L", "layers of the model", whole, default=8, rare=True)
    add(parser, "--split", "L,...", "layers of each stage: even, or such as 3,1,2,2", default="even", rare=True)


def add_table(parser: argparse.ArgumentParser, *, of_steps: bool = False) -> None:
    """Which cases: schedules, models and dtypes, each with each; ``of_steps``: or a step of the user's."""
    every = ("all", *SCHEDULES)
    names = f"all, or some of {', '.join(SCHEDULES)}, or a FILE.csv"
    add(parser, "--schedule", "NAME,...", names, known=every, default="all")
    add_shape(parser, of_steps=of_steps)
    add_layers(parser)
    add(
        parser,
        "--model",
        "NAME,...",
        f"some of {', '.join(MODELS)}",
        known=MODELS,
        default="gpt,gpt-tied",
        rare=not of_steps,
    )
    add(parser, "--dtype", "NAME,...", DTYPE_NAMES, known=DTYPES, default="fp32", rare=True)
    add(parser, "--loss", None, "mean over microbatches, or sum over tokens", choices=LOSSES, default="mean", rare=True)
    add(parser, "--seed", "N", "the seed of weights and data", whole, default=0, rare=True)


def add_config(parser: argparse.ArgumentParser) -> None:
    """A step's config in place of all of that."""
    add(parser, "--config", "FILE", "run what this JSON file says, a step's config, in place of options")


OF_TABLE = ("schedule", "ranks", "virtual", "microbatches", "layers", "split", "model", "dtype", "loss", "seed")


def config_of(options: argparse.Namespace) -> Config:
    """The config that ``--config`` names; raises where the command line says of the case, too."""
    refuse_unused(options, [f"--{name}" for name in OF_TABLE], "with --config, which says it")
    return read_config(options.config)


def device_of(options: argparse.Namespace, configs: Sequence[Config]) -> str:
    """Where these are run: by ``--device``, or else by what they say. Raises ``CaseError`` where they disagree."""
    said: dict[str, Config] = {config["device"]: config for config in configs if "device" in config.data}
    if len(said) > 1 and "--device" not in options.given:
        each = ", ".join(f"{config.name} says {device}" for device, config in said.items())
        raise CaseError(f"{each}: all run on one device; give --device")
    return options.device if "--device" in options.given or not said else next(iter(said))


def tell_notes(config: Config, work: Work) -> None:
    """Say what a reader of a verdict on ``work`` must know, which is run of ``config``."""
    for note in notes_of(config, work):
        Terminal().say(note)


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """How long one case may take."""
    add(parser, "--timeout", "SECONDS", "how long a case may take (simulated: stand still)", parse_seconds, default=120)


def add_world(parser: argparse.ArgumentParser) -> None:
    """Where ranks run, and how long."""
    where = "where ranks compute: cpu, cuda, ... (default auto: the accelerator if there is one)"
    add(parser, "--device", "TYPE", where, parse_device, known=(AUTO, *COMMON), default=AUTO)
    add_timeout(parser)


def table_of(options: argparse.Namespace) -> tuple[list[Case], Mapping[str, str]]:
    """The cases that options of ``add_table`` ask for, and why others cannot be."""
    shape = Shape(options.ranks, options.microbatches, options.virtual)
    found = select_names(options.schedule, shape, fits=lambda stages: _split(options, stages))
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
