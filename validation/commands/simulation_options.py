"""The options that choose a simulated world, and what they say together."""

import argparse
from typing import TYPE_CHECKING

from pipeproof.commands.option_parser import UsageError, add, refuse_unused, share, whole
from pipeproof.pipeline.sizes import MOST_ACTIONS, MOST_SEED, check_count
from pipeproof.pipeline.transports import RULES, keeps_none, transport_of
from pipeproof.worlds.kinds import KINDS, MOST_RUNS, REAL, parse_interleaving

if TYPE_CHECKING:
    from pipeproof.wings.simulated import Decisions, Simulation

_SIMULATED_OPTIONS = ("--transport", "--room", "--interleaving", "--interleavings", "--exhaust")
ANY = "any"  # transport
SEARCHED = 20  # seeds: each adversary three times
_TRANSPORTS = [word for one, rules in RULES.items() for word in (*rules.known_as, one.value)]
_NOT_REAL = "without --world simulated"


def add_simulation(parser: argparse.ArgumentParser, *, drawn: bool = False) -> None:
    """Where ranks are: processes, or threads of one process that a seed interleaves. ``drawn``: cases are."""
    group = parser.add_argument_group("simulated ranks")
    kinds = "ranks are processes, or threads of one that a seed decides"
    rules = f"what simulated messages may do: one of {', '.join(_TRANSPORTS)}"
    kept = "how many bytes of what one rank sends to another are kept until they are received, as NCCL and MPI may do"
    one = "the seed of a simulated run: who is next, and what moves; or as a replay line has it"
    if drawn:
        rules, one = f"{rules}; {ANY}: drawn with each case", f"{one}; drawn with each case, unless it is given"
    every = f"run every interleaving that differs, at most N of each case (default: {MOST_RUNS})"
    add(group, "--world", None, kinds, choices=KINDS, default=REAL)
    add(group, "--transport", "NAME", rules, choices=[*_TRANSPORTS, *[ANY] * drawn], default="gloo", rare=True)
    add(group, "--room", "BYTES", f"{kept} (default: 0)", whole, default=0, rare=True)
    add(group, "--interleaving", "N", one, parse_interleaving, default=0, rare=True)
    many = "try each case under so many seeds, until one is no pass"
    add(group, "--interleavings", "N", many, whole, default=1, rare=True)
    add(group, "--exhaust", "N", every, whole, nargs="?", const=MOST_RUNS, rare=True)


def add_virtual_time(group: argparse._ActionsContainer) -> None:
    """Where the ranks are whose steps are timed: processes, or simulated ranks that have a clock each."""
    kinds = "real: ranks are processes; simulated: threads of one, each with a clock of its own, on any number of ranks"
    add(group, "--world", None, kinds, choices=KINDS, default=REAL)
    add(
        group,
        "--transport",
        "NAME",
        f"what simulated messages may do: one of {', '.join(_TRANSPORTS)}",
        choices=_TRANSPORTS,
        default="gloo",
        rare=True,
    )
    late = "what a simulated message takes on its way, in seconds (default: 0)"
    add(group, "--latency", "S", late, share, default=0.0, rare=True)


def add_search(parser: argparse.ArgumentParser) -> None:
    """Where ranks are, for who looks for what is known to be there: transports and seeds are a fault's own."""
    group = parser.add_argument_group("simulated ranks")
    kinds = "simulated: plant the races and deadlocks that only simulated ranks show"
    rules = f"what simulated messages may do: one of {', '.join(_TRANSPORTS)} (default: each that shows the fault)"
    many = "try each under at most so many seeds, until something is wrong"
    add(group, "--world", None, kinds, choices=KINDS, default=REAL)
    add(group, "--transport", "NAME", rules, choices=_TRANSPORTS, rare=True)
    add(group, "--interleavings", "N", many, whole, default=SEARCHED, rare=True)


def search_of(options: argparse.Namespace) -> "Simulation | None":
    """What is simulated, but for the transport, where none is named; None on real ranks."""
    if options.world == REAL:
        refuse_unused(options, ("--transport", "--interleavings"), _NOT_REAL)
        return None
    check_count("--interleavings", options.interleavings, most=MOST_ACTIONS)
    from pipeproof.wings.simulated import Simulation

    return Simulation(transport_of(options.transport or "gloo"), count=options.interleavings)


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
    transport = transport_of("gloo" if drawn else options.transport)
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
