"""The options that choose a simulated world, and what they say together."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeproof.commands.option_parser import UsageError, add_count, share, whole, without_effect
from pipeproof.pipeline.sizes import MOST_ACTIONS, MOST_SEED, counted
from pipeproof.pipeline.transports import RULES, keeps_none, transport_of
from pipeproof.worlds.kinds import KINDS, REAL
from pipeproof.worlds.simulated.guide import MOST, Guide, parsed_interleaving
from pipeproof.worlds.simulation import Simulation

if TYPE_CHECKING:
    from pipeproof.cases.decisions import Decisions

_SIMULATED_OPTIONS = ("--transport", "--room", "--interleaving", "--interleavings", "--exhaust", "--fine")
ANY = "any"  # transport
SEARCHED = 20  # seeds: each adversary three times
_TRANSPORTS = [word for one, rules in RULES.items() for word in (*rules.known_as, one.value)]


def add_simulation(parser: argparse.ArgumentParser, *, drawn: bool = False) -> None:
    """Where ranks are: processes, or threads of one process that a seed interleaves. ``drawn``: cases are."""
    group = parser.add_argument_group("simulated ranks")
    kinds = "real: ranks are processes; simulated: threads of one, run one at a time, so that a seed decides all"
    group.add_argument("--world", choices=KINDS, default=REAL, help=kinds)
    rules = "what simulated messages may do: as on gloo, as on NCCL, and others"
    rules += f"; {ANY}: drawn with each case" if drawn else ""
    group.add_argument("--transport", choices=[*_TRANSPORTS, *[ANY] * drawn], default="gloo", help=rules)
    kept = "how many bytes of what one rank sends to another are kept until they are received, as NCCL and MPI may do"
    group.add_argument("--room", type=whole, default=0, metavar="BYTES", help=f"{kept} (default: 0)")
    one = "the seed of a simulated run: who is next, and what moves; or as a replay line has it"
    one += "; drawn with each case, unless it is given" if drawn else ""
    group.add_argument("--interleaving", type=parsed_interleaving, default=0, metavar="N", help=one)
    add_count(group, "--interleavings", "N", "try each case under so many seeds, until one is no pass", default=1)
    every = f"run every interleaving that differs, at most N of each case (default: {MOST})"
    group.add_argument("--exhaust", type=whole, nargs="?", const=MOST, metavar="N", help=every)
    often = "another rank may also be next wherever one calls a function of torch: for what ranks share in Python"
    group.add_argument("--fine", action="store_true", help=often)


def add_virtual_time(group: argparse._ActionsContainer) -> None:
    """Where the ranks are whose steps are timed: processes, or simulated ranks that have a clock each."""
    kinds = "real: ranks are processes; simulated: threads of one, each with a clock of its own, on any number of ranks"
    group.add_argument("--world", choices=KINDS, default=REAL, help=kinds)
    group.add_argument("--transport", choices=_TRANSPORTS, default="gloo", help="what simulated messages may do")
    late = "what a simulated message takes on its way, in seconds (default: 0)"
    group.add_argument("--latency", type=share, default=0.0, metavar="S", help=late)


def add_search(parser: argparse.ArgumentParser) -> None:
    """Where ranks are, for who looks for what is known to be there: transports and seeds are a fault's own."""
    group = parser.add_argument_group("simulated ranks")
    kinds = "simulated: plant the races and deadlocks that only simulated ranks show"
    group.add_argument("--world", choices=KINDS, default=REAL, help=kinds)
    rules = "what simulated messages may do (default: each of those that show the fault)"
    group.add_argument("--transport", choices=_TRANSPORTS, help=rules)
    many = "try each under at most so many seeds, until something is wrong"
    add_count(group, "--interleavings", "N", many, default=SEARCHED)


def search_of(options: argparse.Namespace) -> Simulation | None:
    """What is simulated, but for the transport, where none is named; None on real ranks."""
    if options.world == REAL:
        without_effect(options, ("--transport", "--interleavings"), "without --world simulated")
        return None
    counted("--interleavings", options.interleavings, most=MOST_ACTIONS)
    return Simulation(transport_of(options.transport or "gloo"), count=options.interleavings)


def simulation_of(options: argparse.Namespace) -> Simulation | None:
    """What is simulated; None on real ranks. Raises ``UsageError`` for options that then say nothing."""
    if options.world == REAL:
        without_effect(options, _SIMULATED_OPTIONS, "without --world simulated")
        return None
    if isinstance(options.interleaving, Guide):
        without_effect(options, ["--interleavings"], "with an --interleaving that is no seed")
    else:
        counted("--interleaving", options.interleaving, least=0, most=MOST_SEED)
    counted("--interleavings", options.interleavings, most=MOST_ACTIONS)
    if options.exhaust is not None:
        without_effect(options, ["--interleaving", "--interleavings"], "with --exhaust, which runs them all")
        counted("--exhaust", options.exhaust, most=MOST_ACTIONS)
    if options.transport == ANY:
        without_effect(options, ["--room"], f"with --transport {ANY}, where it is drawn with each case")
    transport = transport_of("gloo" if options.transport == ANY else options.transport)
    counted("--room", options.room, least=0, most=MOST_SEED)
    if options.room and (why := keeps_none(transport)):
        raise UsageError(f"--room {options.room}: {why}")
    one = Simulation(transport, options.interleaving, options.interleavings, options.exhaust, options.fine)
    return replace(one, room=options.room)


def decisions_of(options: argparse.Namespace) -> "Decisions | None":
    """What is drawn with each case: a seed, where none is given, and a transport, where any will do."""
    from pipeproof.cases.decisions import EVERY, Decisions

    if (simulation := simulation_of(options)) is None:
        return None
    seeds = options.exhaust is None and "--interleaving" not in options.given
    transports = EVERY if options.transport == ANY else (simulation.transport,)
    return Decisions(simulation, seeds, transports) if seeds or len(transports) > 1 else None
