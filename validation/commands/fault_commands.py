"""The commands about faults, as options: ``specimens``, which plants them, and ``tolerance``, how small they may be."""

import argparse
from typing import Any

from pipeline.sizes import MOST_SEED, counted
from validation.cases.case import DTYPES, MODELS, CaseError
from validation.commands.option_types import seconds
from validation.commands.selection import dtype_names, schedule_names
from validation.reports.terminal import Terminal


def add_fault_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the two commands. torch is imported by the one that runs."""
    _add_tolerance(
        commands.add_parser("tolerance", help="measure rounding, and how far the smallest faults lie above it")
    )
    _add_specimens(commands.add_parser("specimens", help="plant known faults; see that each is caught and named"))


def _add_tolerance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=",".join(MODELS), metavar="NAME,...", help="(default: all)")
    parser.add_argument("--dtype", default=",".join(DTYPES), metavar="NAME,...", help="(default: all)")
    parser.add_argument(
        "--microbatches", type=counts, default=(2, 4, 8, 16, 32), metavar="M,...", help="(default 2..32)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", metavar="FILE", help="write the page there, rather than to the terminal")
    parser.add_argument("--svg", metavar="FILE", help="draw it (needs the extra 'plot')")
    parser.set_defaults(run=_tolerance)


def counts(text: str) -> tuple[int, ...]:
    """``2,8`` as numbers; argparse names this function where it fails."""
    return tuple(map(int, text.split(",")))


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


def _tolerance(options: argparse.Namespace) -> int:
    from validation.commands.gap_survey import Survey, show_tolerance

    models = [name.strip() for name in options.model.split(",")]
    survey = Survey(models, dtype_names(options.dtype), options.microbatches, options.seed)
    return show_tolerance(survey, markdown=options.markdown, svg=options.svg, arguments=options.arguments)


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
