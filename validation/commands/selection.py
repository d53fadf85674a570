"""Options that commands share: which schedules are asked for, and where their ranks are."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeproof.commands.option_parser import UsageError, add, refuse_unused, share, whole
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
from pipeproof.pipeline.sizes import MOST_ACTIONS, MOST_SEED, check_count
from pipeproof.pipeline.transports import RULES, keeps_none, transport_of
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.accelerator import AUTO, COMMON, parse_device
from pipeproof.worlds.kinds import KINDS, MOST_RUNS, REAL, parse_interleaving
from pipeproof.worlds.timeout import parse_seconds

if TYPE_CHECKING:
    from pipeproof.wings.simulated import Decisions, Simulation


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
    models = f"some of {', '.join(MODELS)}"
    add(parser, "--model", "NAME,...", models, known=MODELS, default="gpt,gpt-tied", rare=not of_steps)
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
    chosen, left_out = select_names(options.schedule, shape, fits=lambda stages: _split(options, stages))
    cases = [
        case_of(options, name, schedule, model, dtype)
        for dtype in dtype_names(options.dtype)
        for model in options.model.split(",")
        for name, schedule in chosen.items()
    ]
    return cases, left_out


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


_SIMULATED_OPTIONS = ("--transport", "--room", "--interleaving", "--interleavings", "--exhaust")
ANY = "any"  # transport
SEARCHED = 20  # seeds: each adversary three times
_TRANSPORTS = [word for one, rules in RULES.items() for word in (*rules.known_as, one.value)]
_NOT_REAL = "without --world simulated"


def add_simulation(parser: argparse.ArgumentParser, *, drawn: bool = False) -> None:
    """Where ranks are: processes, or threads of one process that a seed interleaves. ``drawn``: cases are."""
    kept = "how many bytes of what one rank sends to another are kept until they are received, as NCCL and MPI may do"
    one = "the seed of a simulated run: who is next, and what moves; or as a replay line has it"
    many = "try each case under so many seeds, until one is no pass"
    every = f"run every interleaving that differs, at most N of each case (default: {MOST_RUNS})"
    if drawn:
        one = f"{one}; drawn with each case, unless it is given"
    group = parser.add_argument_group("simulated ranks")
    _add_world(group, "ranks are processes, or threads of one that a seed decides", any_one=drawn)
    add(group, "--room", "BYTES", f"{kept} (default: 0)", whole, default=0, rare=True)
    add(group, "--interleaving", "N", one, parse_interleaving, default=0, rare=True)
    add(group, "--interleavings", "N", many, whole, default=1, rare=True)
    add(group, "--exhaust", "N", every, whole, nargs="?", const=MOST_RUNS, rare=True)


def _add_world(
    group: argparse._ActionsContainer, kinds: str, *, any_one: bool = False, default: str | None = "gloo"
) -> None:
    more = f"; {ANY}: drawn with each case" if any_one else "" if default else " (default: each that shows the fault)"
    rules, names = f"what simulated messages may do: one of {', '.join(_TRANSPORTS)}{more}", [ANY] if any_one else []
    add(group, "--world", None, kinds, choices=KINDS, default=REAL)
    add(group, "--transport", "NAME", rules, choices=[*_TRANSPORTS, *names], default=default, rare=True)


def add_virtual_time(group: argparse._ActionsContainer) -> None:
    """Where the ranks are whose steps are timed: processes, or simulated ranks that have a clock each."""
    kinds = "real: ranks are processes; simulated: threads of one, each with a clock of its own, on any number of ranks"
    late = "what a simulated message takes on its way, in seconds (default: 0)"
    _add_world(group, kinds)
    add(group, "--latency", "S", late, share, default=0.0, rare=True)


def add_search(parser: argparse.ArgumentParser) -> None:
    """Where ranks are, for who looks for what is known to be there: transports and seeds are a fault's own."""
    parser.set_defaults(room=0, interleaving=0, exhaust=None)
    group = parser.add_argument_group("simulated ranks")
    kinds = "simulated: plant the races and deadlocks that only simulated ranks show"
    many = "try each under at most so many seeds, until something is wrong"
    _add_world(group, kinds, default=None)
    add(group, "--interleavings", "N", many, whole, default=SEARCHED, rare=True)


def simulation_of(options: argparse.Namespace) -> "Simulation | None":
    """What is simulated; None on real ranks. Raises ``UsageError`` for options that then say nothing."""
    if options.world == REAL:
        refuse_unused(options, _SIMULATED_OPTIONS, _NOT_REAL)
        return None
    if not isinstance(options.interleaving, int):
        refuse_unused(options, ["--interleavings"], "with an --interleaving that is no seed")
    else:
        check_count("--interleaving", options.interleaving, least=0, most=MOST_SEED)
    check_count("--interleavings", options.interleavings, most=MOST_ACTIONS)
    if options.exhaust is not None:
        refuse_unused(options, ["--interleaving", "--interleavings"], "with --exhaust, which runs them all")
        check_count("--exhaust", options.exhaust, most=MOST_ACTIONS)
    drawn = options.transport == ANY
    refuse_unused(options, ["--room"], f"with --transport {ANY}, where it is drawn with each case", where=drawn)
    transport = transport_of("gloo" if drawn else options.transport or "gloo")
    check_count("--room", options.room, least=0, most=MOST_SEED)
    if options.room and (why := keeps_none(transport)):
        raise UsageError(f"--room {options.room}: {why}")
    from pipeproof.wings.simulated import Simulation

    return Simulation(transport, options.interleaving, options.interleavings, options.exhaust, options.room)


def decisions_of(options: argparse.Namespace) -> "Decisions | None":
    """What is drawn with each case: a seed, where none is given, and a transport, where any will do."""
    if (simulation := simulation_of(options)) is None:
        return None
    from pipeproof.wings.simulated import EVERY, Decisions

    seeds = options.exhaust is None and "--interleaving" not in options.given
    transports = EVERY if options.transport == ANY else (simulation.transport,)
    return Decisions(simulation, seeds, transports) if seeds or len(transports) > 1 else None
