"""Which schedules a command line asks for: families by name, files, or all families that can be."""

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeproof.commands.option_parser import add, refuse_unused, whole
from pipeproof.commands.work import Work, notes_of
from pipeproof.own.case import DTYPES, LOSSES, MODELS, SCHEDULES, Case, CaseError, most_stages
from pipeproof.own.config import Config, read_config
from pipeproof.own.own_schedule import own_schedule
from pipeproof.pipeline.files import is_csv
from pipeproof.pipeline.partition import parse_split
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.schedules import FAMILIES, LOOPED, build, can_have, canonical_name, list_known, virtuals
from pipeproof.pipeline.sizes import MOST_LAYERS, MOST_RANKS, check_count
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.accelerator import AUTO, COMMON, parse_device
from pipeproof.worlds.timeout import parse_seconds

RANKS, MICROBATCHES = 4, 8
COMPOSED = "composed"  # of --check: steps are held against themselves
Fits = Callable[[int], object]


@dataclass(frozen=True)
class Shape:
    """What families are built for, as far as it is said.

    None is 4 ranks, 8 microbatches, and each family's own number of stages per rank, 2 for a loop.
    """

    ranks: int | None = None
    microbatches: int | None = None
    virtual: int | None = None

    def family(self, name: str, *, fits: Fits = lambda stages: None) -> Schedule:
        """The schedule ``name`` of this shape. Raises ``ScheduleError`` where it cannot be, or what ``fits`` raises.

        ``fits`` is asked before the schedule is built, which can take long.
        """
        family = canonical_name(name)
        own = virtuals(family, looped=1 if family == "zb-h1" else 2)
        virtual = check_count("virtual", own if self.virtual is None else self.virtual, most=MOST_LAYERS)
        can_have(family, virtual)
        ranks = check_count("ranks", RANKS if self.ranks is None else self.ranks, most=MOST_RANKS)
        fits(ranks * virtual)
        microbatches = MICROBATCHES if self.microbatches is None else self.microbatches
        return build(family, ranks=ranks, microbatches=microbatches, virtual=virtual)

    def agree(self, path: str, schedule: Schedule) -> None:
        """Raise ``CaseError`` where something else is said than what the file at ``path`` has."""
        for option, said, own in (
            ("ranks", self.ranks, schedule.n_ranks),
            ("microbatches", self.microbatches, schedule.microbatches),
            ("virtual", self.virtual, most_stages(schedule)),
        ):
            if said not in (None, own):
                raise CaseError(f"--{option} is {said}, but {path} has {own}: leave the option out")


@dataclass(frozen=True)
class Selection:
    """Schedules and programs by name (a file's is its path), and why others are left out."""

    chosen: Mapping[str, Schedule | Program]
    left_out: Mapping[str, str]


def select_names(text: str, shape: Shape, *, fits: Fits) -> Selection:
    """``all``, or names and files with commas between.

    ``fits`` raises ``ScheduleError`` for a number of stages that cannot be run. What was asked for by name raises it
    too; of ``all``, families that cannot be are left out, unless that leaves nothing; ``virtual`` is for those that can
    have it. A shape is for families: where all are files it may say nothing else than they do.
    """
    if text.strip().lower() != "all":
        names = [name.strip() for name in text.split(",")]
        found = {name: _find_schedule(name, shape, fits) for name in names}
        if all(map(is_csv, names)):
            for path, mine in found.items():
                shape.agree(path, schedule_in(mine))
        return Selection(found, {})
    chosen: dict[str, Schedule | Program] = {}
    left_out: dict[str, str] = {}
    for name in FAMILIES:
        own = shape if name in LOOPED else Shape(shape.ranks, shape.microbatches)
        try:
            chosen[name] = _find_schedule(name, own, fits)
        except ScheduleError as error:
            left_out[name] = str(error)
    if not chosen:
        groups = defaultdict[str, list[str]](list)
        for name, reason in left_out.items():
            groups[reason].append(name)
        each = "; ".join(f"{', '.join(group)}: {reason}" for reason, group in groups.items())
        raise CaseError(next(iter(groups)) if len(groups) == 1 else f"no schedule can be: {each}")
    return Selection(chosen, left_out)


def _find_schedule(name: str, shape: Shape, fits: Fits) -> Schedule | Program:
    if not is_csv(name):
        return shape.family(name, fits=fits)
    found = own_schedule(name)
    fits(schedule_in(found).n_stages)
    return found


def schedule_in(found: Schedule | Program) -> Schedule:
    """What is computed, of a schedule or a program."""
    return found.schedule if isinstance(found, Program) else found


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


def add_shape(parser: argparse.ArgumentParser) -> None:
    """How many ranks, stages and microbatches a family of schedules is built for."""
    add(parser, "--ranks", "P", f"how many ranks (default {RANKS})", whole)
    add(parser, "--virtual", "V", f"stages per rank, for {', '.join(sorted(LOOPED))} (default 2)", whole)
    add(parser, "--microbatches", "M", f"how many microbatches (default {MICROBATCHES})", whole)


def add_layers(parser: argparse._ActionsContainer) -> None:
    """How many layers a model has, and how stages share them."""
    add(parser, "--layers", "L", "layers of the model", whole, default=8)
    add(parser, "--split", "L,...", "layers of each stage: even, or such as 3,1,2,2", default="even")


def add_table(parser: argparse.ArgumentParser) -> None:
    """Which cases: schedules, models and dtypes, each with each."""
    every = ("all", *SCHEDULES)
    names = (
        f"all, or some of {', '.join(SCHEDULES)}, or a FILE.csv, which has ranks, stages and microbatches of its own"
    )
    add(parser, "--schedule", "NAME,...", names, known=every, default="all")
    add_shape(parser)
    add_layers(parser)
    add(parser, "--model", "NAME,...", f"some of {', '.join(MODELS)}", known=MODELS, default="gpt,gpt-tied")
    add(parser, "--dtype", "NAME,...", DTYPE_NAMES, known=DTYPES, default="fp32")
    add(parser, "--loss", None, "mean over microbatches, or sum over tokens", choices=LOSSES, default="mean")
    add(parser, "--seed", "N", "the seed of weights and data", whole, default=0)


def add_config(parser: argparse.ArgumentParser) -> None:
    """A step's config in place of all of that."""
    add(parser, "--config", "FILE", "run what this JSON file says, a step's config; no option may then say which case")


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
    hang = "a case that takes longer counts as a hang; on simulated ranks, one in which nothing moves for so long"
    add(parser, "--timeout", "SECONDS", hang, parse_seconds, default=120)


def add_world(parser: argparse.ArgumentParser) -> None:
    """Where ranks run, and how long."""
    where = "where ranks compute: cpu, cuda, or what else torch names (default auto: the accelerator if there is one)"
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
