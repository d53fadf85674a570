"""The commands that run cases on ranks, as options: ``validate``, ``fuzz``, ``gate`` and ``replay``."""

import argparse
from typing import Any

from pipeline.files import is_csv
from pipeline.sizes import MOST_ACTIONS, MOST_PROCESSES, MOST_SEED, counted
from validation.cases.case import FUZZED_DTYPES, Case, CaseError
from validation.cases.runtimes import OWN, TORCH
from validation.commands.case_options import DTYPE_NAMES, STATUSES, add_recording, add_table, add_world, table_of
from validation.commands.selection import dtype_names, schedule_names
from validation.worlds.launcher import start_fork_server


def add_case_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the four commands. torch is imported by the one that runs, and meanwhile by the fork server for its ranks."""
    _add_validate(
        commands.add_parser(
            "validate",
            help="run schedules beside the reference and compare everything",
            description="By default: every schedule, on 4 ranks, with a GPT and with one whose weights are tied.",
            epilog=STATUSES,
        )
    )
    _add_fuzz(commands.add_parser("fuzz", help="run many random cases; a failure shrinks to a line that replays it"))
    _add_gate(
        commands.add_parser(
            "gate", help="decide a merge: the table of schedules, fuzzing, and a planted fault", epilog=STATUSES
        )
    )
    _add_replay(commands.add_parser("replay", help="run one case again", epilog=STATUSES))


def _add_validate(parser: argparse.ArgumentParser) -> None:
    add_table(parser)
    parser.add_argument("--profile", action="store_true", help="print where each rank's time went")
    add_recording(parser)
    add_world(parser)
    parser.set_defaults(run=_validate)


def _add_fuzz(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=200, metavar="N", help="how many (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--schedule", default="all", metavar="NAME,...", help="(default %(default)s)")
    drawn = ",".join(FUZZED_DTYPES)
    parser.add_argument("--dtype", default=drawn, metavar="NAME,...", help=f"{DTYPE_NAMES} (default %(default)s)")
    parser.add_argument("--max-ranks", type=int, default=4, metavar="P", help="(default %(default)s)")
    parser.add_argument(
        "--runtime",
        choices=(OWN, TORCH),
        default=OWN,
        help="whose: torch is torch.distributed.pipelining (default %(default)s)",
    )
    add_world(parser)
    parser.set_defaults(run=_fuzz)


def _add_gate(parser: argparse.ArgumentParser) -> None:
    add_table(parser)
    parser.add_argument("--cases", type=int, default=50, metavar="N", help="how many are drawn from the seed")
    parser.add_argument("--case", action="append", default=[], metavar="LINE", help="one more case, as for replay")
    parser.add_argument("--max-ranks", type=int, metavar="P", help="of drawn cases (default: as in the table)")
    parser.add_argument("--junit", metavar="FILE", help="write a test report there")
    parser.add_argument("--summary", metavar="FILE", help="write a table in Markdown there")
    parser.add_argument("--artifacts", metavar="DIR", help="leave the records of failing cases there")
    parser.add_argument("--annotations", choices=("github",), help="print what is wrong so that GitHub shows it")
    add_world(parser)
    parser.set_defaults(run=_gate)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", help='the line that a failure printed, e.g. "1f1b r4 s4 m8 split=2,2,2,2 seed=17"')
    parser.add_argument("--json", metavar="FILE", help="write the verdict there")
    parser.add_argument("--plugin", metavar="FILE", help="a Python file that registers the specimen of the line")
    parser.set_defaults(run=_replay)
    add_recording(parser)


def _validate(options: argparse.Namespace) -> int:
    cases, left_out = table_of(options)
    start_fork_server()
    from validation.commands.campaign import Setting, validate_all

    setting = Setting(options.device, options.timeout, options.json, options.profile, record=options.record)
    return validate_all(cases, setting, left_out=left_out)


def _gate(options: argparse.Namespace) -> int:
    table, missing = table_of(options)
    start_fork_server()
    from validation.commands.campaign import Setting
    from validation.commands.gate import Plan, Reports, gate

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
    start_fork_server()
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
    start_fork_server()
    from validation.cases.specimens import PLUGINS
    from validation.commands.campaign import Setting, validate_all

    if options.plugin is not None:
        PLUGINS.load(options.plugin)
    return validate_all([case], Setting(case.device, json=options.json, explain=True, record=options.record))
