"""``bench``: a small step of each of some configs, side by side."""

import argparse
from typing import Any

from pipeproof.cases.case import Case, CaseError
from pipeproof.cases.config import Config, read_config
from pipeproof.cases.runtimes import OWN
from pipeproof.cases.timings import FEWEST
from pipeproof.cases.work import Work, work_of
from pipeproof.commands.option_parser import add_count
from pipeproof.commands.outputs import Outputs, add_outputs
from pipeproof.commands.selection import add_world, device_of
from pipeproof.pipeline.sizes import counted
from pipeproof.worlds.launcher import start_fork_server

_MOST = 10_000  # rounds


def add_bench_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench",
        help="how long does a small step of each config take? they take turns",
        description="How long does a small step of each config take, and how much memory? They take turns. Where a "
        "config differs from the first by no more than single rounds differ, that is called no difference. Nothing is "
        "judged, except that a loss that is not finite ends with 1.",
    )
    parser.add_argument(
        "config", nargs="+", help="a JSON file, as advise --write makes it; the others are compared with the first"
    )
    add_count(parser, "--rounds", "N", "how often each takes its turn, after one that does not count", default=5)
    add_world(parser)
    add_outputs(parser, what="the numbers")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    counted("--rounds", options.rounds, least=FEWEST, most=_MOST)
    configs = [read_config(path) for path in options.config]
    works, device = [_timed(config) for config in configs], device_of(options, configs)
    start_fork_server()
    from pipeproof.commands.bench import bench
    from pipeproof.commands.campaign import Setting

    setting = Setting(device, options.timeout, Outputs.of(options))
    return bench(list(zip(configs, works, strict=True)), setting, rounds=options.rounds)


def _timed(config: Config) -> Work:
    """What of ``config`` is run. Raises ``CaseError`` where that is no step of our own."""
    work = work_of(config)
    if isinstance(work, Case) and work.runtime != OWN:
        raise CaseError(f"{config.name}: runtime {work.runtime} is not timed here: expected {OWN}; leave it out")
    if isinstance(work, Case) and work.specimen:
        raise CaseError(
            f"{config.name}: specimen {work.specimen} is a planted fault: expected a right step; leave it out"
        )
    return work
