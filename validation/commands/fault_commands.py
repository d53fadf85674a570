"""The command about faults, as options: ``specimens``, which plants them."""

import argparse
from typing import Any

from pipeline.sizes import MOST_SEED, counted
from validation.cases.case import CaseError
from validation.commands.option_types import seconds
from validation.commands.selection import schedule_names
from validation.reports.terminal import Terminal


def add_fault_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command, which imports torch when it runs."""
    _add_specimens(commands.add_parser("specimens", help="plant known faults; see that each is caught and named"))


def _add_specimens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="one line for each, without running anything")
    parser.add_argument(
        "--schedule", default="", metavar="NAME,...", help="all, or some: each specimen there, not in its smallest case"
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help="these specimens alone")
    parser.add_argument(
        "--plugin", metavar="FILE", help="a Python file that registers specimens of your own: those alone, or --only"
    )
    parser.add_argument("--shrink", action="store_true", help="shrink a random failing case of each to its smallest")
    parser.add_argument("--seed", type=int, default=0, help="where --shrink begins")
    parser.add_argument("--final-only", action="store_true", help="from final gradients alone: record no tensors")
    parser.add_argument("--timeout", type=seconds, default=120.0, metavar="SECONDS", help="of one case (default 120)")
    parser.add_argument("--json", metavar="FILE", help="write results there")
    parser.set_defaults(run=_specimens)


def _specimens(options: argparse.Namespace) -> int:
    from validation.commands.campaign import Setting
    from validation.commands.catalogue import chosen, listing, loaded, shrink_all, try_all

    names = chosen(options.only, otherwise=[] if options.plugin is None else loaded(options.plugin))
    if options.list:
        Terminal().say(listing(names))
        return 0
    schedules = schedule_names(options.schedule) if options.schedule else []
    setting = Setting("cpu", options.timeout, options.json)
    counted("--seed", options.seed, least=0, most=MOST_SEED)
    if options.shrink:
        if schedules or options.final_only:
            raise CaseError("--shrink draws its own schedules and names nothing: leave out --schedule and --final-only")
        return shrink_all(names, setting, seed=options.seed)
    return try_all(names, schedules, setting, final_only=options.final_only)
