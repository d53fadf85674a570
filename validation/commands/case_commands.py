"""The commands about cases and records, as options: ``validate``, ``fuzz``, ``gate``, ``replay``, ``record`` and so on.

torch is imported by the one that runs, and meanwhile by the fork server where ranks will.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from pipeproof.cases.case import DTYPES, FUZZED_DTYPES, SCHEDULES, Case, CaseError
from pipeproof.cases.primitives.stacks import Stack
from pipeproof.cases.runtimes import OWN, TORCH
from pipeproof.cases.work import case_of, work_of
from pipeproof.commands.option_parser import UsageError, add_count, add_names, without_effect
from pipeproof.commands.outputs import Outputs, add_file, add_outputs, add_recording
from pipeproof.commands.primitive_commands import add_stacks, asks_for_primitives, validate_config, validate_stacks
from pipeproof.commands.selection import (
    DTYPE_NAMES,
    add_config,
    add_table,
    add_timeout,
    add_world,
    config_of,
    device_of,
    dtype_names,
    schedule_names,
    table_of,
    tell_notes,
)
from pipeproof.commands.simulation_options import (
    add_search,
    add_simulation,
    decisions_of,
    search_of,
    simulation_of,
)
from pipeproof.pipeline.files import is_csv
from pipeproof.pipeline.sizes import MOST_ACTIONS, MOST_PROCESSES, MOST_SEED, counted
from pipeproof.pipeline.transports import transport_of
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.accelerator import AUTO, CPU, parsed
from pipeproof.worlds.launcher import start_fork_server

_WHOLE, _COMPOSED = "whole", "composed"
_SHRINKS = "with --shrink, which draws its own schedules and names nothing"
Commands: TypeAlias = "argparse._SubParsersAction[Any]"


def add_case_commands(commands: Commands) -> None:
    """Add the eight commands."""
    for add in (_add_validate, _add_replay, _add_fuzz, _add_gate, _add_records, _add_specimens):
        add(commands)


def _add_validate(commands: Commands) -> None:
    parser = commands.add_parser(
        "validate",
        help="run schedules beside the reference and compare everything",
        description="Run schedules beside the reference and compare everything: by default every schedule, with a GPT "
        "and with one whose weights are tied.",
    )
    add_table(parser)
    add_stacks(parser)
    add_config(parser)
    parser.add_argument("--profile", action="store_true", help="print where each rank's time went")
    _add_check(parser)
    add_world(parser)
    add_simulation(parser)
    add_recording(parser)
    add_outputs(parser, page=True)
    parser.set_defaults(run=_validate)


def _add_check(parser: argparse.ArgumentParser) -> None:
    about = (
        "whole: beside a reference on one device; composed: each stage is run again on its own rank (default: whole)"
    )
    parser.add_argument("--check", choices=(_WHOLE, _COMPOSED), default=_WHOLE, help=about)


def _is_composed(options: argparse.Namespace) -> bool:
    """Whether steps are held against themselves. Raises ``UsageError`` for what has no effect then."""
    composed: bool = options.check == _COMPOSED
    without_effect(options, ["--record", "--profile"] if composed else (), "with --check composed")
    return composed


def _add_fuzz(commands: Commands) -> None:
    parser = commands.add_parser("fuzz", help="run many random cases; a failure shrinks to a line that replays it")
    add_count(parser, "--cases", "N", "how many are drawn", default=200)
    add_count(parser, "--seed", "N", "one seed draws the same cases again", default=0)
    add_names(parser, "--schedule", f"all, or some of {', '.join(SCHEDULES)}", known=("all", *SCHEDULES), default="all")
    add_names(parser, "--dtype", DTYPE_NAMES, known=DTYPES, default=",".join(FUZZED_DTYPES))
    add_count(parser, "--max-ranks", "P", "the most ranks that a drawn case may have", default=4)
    runtimes = "which one runs them: torch is torch.distributed.pipelining"
    parser.add_argument("--runtime", choices=(OWN, TORCH), default=OWN, help=runtimes)
    goes_on = "where a long campaign says how far it has come; the same call goes on from there"
    parser.add_argument("--resume", metavar="FILE", help=goes_on)
    _add_check(parser)
    add_world(parser)
    add_simulation(parser, drawn=True)
    add_outputs(parser, page=True)
    parser.set_defaults(run=_fuzz)


def _add_gate(commands: Commands) -> None:
    about = "decide whether to merge: the table of schedules, fuzzing, and a planted fault"
    parser = commands.add_parser("gate", help=about)
    add_table(parser)
    add_count(parser, "--cases", "N", "how many are drawn from the seed", default=50)
    one_more = "one more case, as replay takes it; may be given again"
    parser.add_argument("--case", action="append", default=[], metavar="LINE", help=one_more)
    add_count(parser, "--max-ranks", "P", "the most ranks that a drawn case may have (default: as in the table)")
    add_file(parser, "--junit", "write a test report there")
    add_file(parser, "--summary", "write a table in Markdown there")
    parser.add_argument("--artifacts", metavar="DIR", help="write the records of failing cases there")
    parser.add_argument("--annotations", choices=("github",), help="print failures as annotations for GitHub Actions")
    add_world(parser)
    add_simulation(parser)
    add_outputs(parser, page=True)
    parser.set_defaults(run=_gate)


def _add_replay(commands: Commands) -> None:
    parser = commands.add_parser("replay", help="run one case again, and say all about it")
    line = "the line that a failure printed, e.g. 1f1b r4 s4 m8 split=2,2,2,2 seed=17; quotes may be left out"
    parser.add_argument("case", nargs="+", help=line)
    parser.add_argument("--plugin", metavar="FILE", help="a Python file that registers the specimen of the line")
    _add_check(parser)
    add_timeout(parser)
    add_simulation(parser)
    add_recording(parser)
    add_outputs(parser, what="the verdict", page=True)
    parser.set_defaults(run=_replay)


def _validate(options: argparse.Namespace) -> int:
    composed = _is_composed(options)
    if asks_for_primitives(options) or options.stack is not None:
        without_effect(options, ["--check"] if composed else (), "with parallel primitives, which are checked whole")
        return validate_stacks(options)
    if options.config is None:
        (cases, left_out), device = table_of(options), options.device
    else:
        config = config_of(options)
        work = work_of(config)
        if isinstance(work, Stack):
            return validate_config(options, config, work)
        tell_notes(config, work)
        cases, left_out, device = [work], {}, device_of(options, [config])
    start_fork_server()
    from pipeproof.commands.campaign import Setting, validate_all

    simulation = simulation_of(options)
    setting = Setting(device, options.timeout, Outputs.of(options), options.profile, simulation=simulation)
    setting = replace(setting, composed=composed)
    return validate_all(cases, setting, left_out=left_out)


def _gate(options: argparse.Namespace) -> int:
    without_effect(options, ["--max-ranks"] if not options.cases else (), "with --cases 0")
    table, missing = table_of(options)
    start_fork_server()
    from pipeproof.commands.campaign import Setting
    from pipeproof.commands.gate import Plan, Reports, gate

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
    setting = Setting(options.device, options.timeout, Outputs.of(options), simulation=simulation_of(options))
    return gate(plan, setting, reports)


def _fuzz(options: argparse.Namespace) -> int:
    if options.runtime != OWN:
        without_effect(options, ["--dtype"], "with --runtime torch, which is run in fp32")
        without_effect(options, ["--check"], f"with --runtime {options.runtime}")
    counted("--cases", options.cases, most=MOST_ACTIONS)
    counted("--max-ranks", options.max_ranks, most=MOST_PROCESSES)
    counted("--seed", options.seed, least=0, most=MOST_SEED)
    schedules, dtypes = schedule_names(options.schedule), dtype_names(options.dtype)
    start_fork_server()
    from pipeproof.commands.campaign import Setting
    from pipeproof.commands.fuzzing import Wish, fuzz_all

    drawn = (options.cases, options.seed, schedules, dtypes, options.max_ranks, options.runtime)
    setting = Setting(options.device, options.timeout, Outputs.of(options), simulation=simulation_of(options))
    setting = replace(setting, composed=options.check == _COMPOSED)
    return fuzz_all(setting, Wish(*drawn, decisions_of(options)), resume=options.resume)


def _replay(options: argparse.Namespace) -> int:
    case = Case.parse(" ".join(options.case))
    composed = _is_composed(options)
    without_effect(options, ["--plugin"] if not case.specimen else (), "on a line without specimen=")
    start_fork_server()
    from pipeproof.cases.specimens import PLUGINS
    from pipeproof.commands.campaign import Setting, validate_all

    if options.plugin is not None:
        PLUGINS.load(options.plugin)
    setting = Setting(case.device, options.timeout, Outputs.of(options), explain=True, plugin=options.plugin)
    return validate_all([case], replace(setting, simulation=simulation_of(options), composed=composed))


def _add_records(commands: Commands) -> None:
    recorder = commands.add_parser("record", help="write what the reference expects of a case, on one device")
    recorder.add_argument("case", nargs="*", help="as replay takes it; quotes may be left out")
    add_config(recorder)
    add_file(recorder, "--out", "the record to write, a safetensors file", required=True)
    recorder.set_defaults(run=_record)
    comparer = commands.add_parser(
        "compare",
        help="is a run right? its record is judged by what was expected, or by a run that was right",
        description="Is a run right? Its record is judged by what was expected, under any schedule, as a live run is. "
        "Of two runs that both may be wrong, `pipeproof diff` says what is different. Of two folders that record_run "
        "wrote in training loops, the first is taken to be right: it says at which step they part, and by what. Exit "
        "status 3: bits differ, and nothing measured tells whether that is rounding.",
    )
    comparer.add_argument("expected", help="what `pipeproof record` wrote, or the folder of a run that is right")
    comparer.add_argument(
        "seen",
        help="what validate or replay wrote with --record, or the folder of a run; its schedule, P and V may be others",
    )
    third = (
        "the folder of a third run, right but with another order of sums: it measures what rounding does, step by step"
    )
    comparer.add_argument("--also", metavar="RUN", help=third)
    add_count(comparer, "--until", "STEP", "of runs, the last step to compare (default: the last one)")
    differ = commands.add_parser(
        "diff",
        help="what did two runs do differently, and why? configs first, then numbers",
        description="What did two runs do differently, and why? Their configs are compared first, then their numbers. "
        "Then each is judged by what its own config asks for: the difference is an order of sums, another answer that "
        "was asked for, or a fault of one of them. Exit status 0: the same, or no further apart than rounding; 1: "
        "different, or one is wrong by its own config; 3: numbers alone do not decide.",
    )
    differ.add_argument("expected", metavar="one", help="what --record wrote in one run, or `pipeproof record`")
    differ.add_argument("seen", metavar="other", help="what --record wrote in another run")
    for parser, run in ((comparer, _compare), (differ, _diff)):
        add_outputs(parser, what="the verdict", page=True)
        parser.set_defaults(run=run)


def _record(options: argparse.Namespace) -> int:
    from pipeproof.commands.offline import record_case

    if (options.config is None) == (not options.case):
        raise UsageError(f"{options.prog}: expected either the line of a case or --config FILE; give one of the two")
    if options.config is None:
        return record_case(Case.parse(" ".join(options.case)), options.out)
    config = config_of(options)
    case = case_of(config)
    tell_notes(config, case)
    return record_case(case, options.out)


def _compare(options: argparse.Namespace) -> int:
    from pipeproof.commands.offline import compare_files, compare_folders

    outputs, folders = Outputs.of(options), [Path(one).is_dir() for one in (options.expected, options.seen)]
    if all(folders):
        until = None if options.until is None else counted("--until", options.until, least=0, most=MOST_ACTIONS)
        return compare_folders(options.expected, options.seen, also=options.also, until=until, outputs=outputs)
    if any(folders):
        folder, other = sorted((options.expected, options.seen), key=lambda one: not Path(one).is_dir())
        raise UsageError(
            f"{folder} is a folder, and {other} is none: expected two runs, which are folders that record_run wrote, "
            "or two records, which are files"
        )
    without_effect(options, ["--also", "--until"], "on records, which are files")
    return compare_files(options.expected, options.seen, outputs=outputs)


def _diff(options: argparse.Namespace) -> int:
    from pipeproof.commands.offline import diff_files

    return diff_files(options.expected, options.seen, outputs=Outputs.of(options))


def _add_specimens(commands: Commands) -> None:
    parser = commands.add_parser("specimens", help="plant known faults; see that each is caught and named")
    parser.add_argument("--list", action="store_true", help="a line for each; nothing runs")
    there = "plant each on these schedules, or on all, and not in its smallest case"
    add_names(parser, "--schedule", there, known=("all", *SCHEDULES))
    add_names(parser, "--only", "these specimens alone (default: all)", known=_all_specimens)
    where = "the type of device that ranks compute on (default: cpu); another one shows more faults than the CPU does"
    parser.add_argument("--device", type=parsed, default=CPU, metavar="TYPE", help=where)
    add_search(parser)
    own = "a Python file that registers specimens of your own: those alone, unless --only says more"
    parser.add_argument("--plugin", metavar="FILE", help=own)
    parser.add_argument("--shrink", action="store_true", help="shrink a random failing case of each to its smallest")
    add_count(parser, "--seed", "N", "one seed lets --shrink draw the same cases again", default=0)
    final = "name faults from final gradients alone: record no tensors"
    parser.add_argument("--final-only", action="store_true", help=final)
    add_timeout(parser)
    add_outputs(parser, what="results")
    parser.set_defaults(run=_specimens)


def _all_specimens() -> Sequence[str]:
    from pipeproof.commands.catalogue import known_on

    return known_on(AUTO, simulated=True)


def _specimens(options: argparse.Namespace) -> int:
    from pipeproof.commands.campaign import Setting
    from pipeproof.commands.catalogue import chosen, listing, loaded, shrink_all, try_all

    lists = ("--schedule", "--device", "--transport", "--interleavings", "--shrink", "--seed", "--final-only")
    without_effect(options, (*lists, "--timeout", "--json") if options.list else (), "with --list, which runs nothing")
    without_effect(options, ["--seed"] if not options.shrink else (), "without --shrink")
    otherwise = ["--schedule", "--device", "--world", "--transport", "--interleavings", "--final-only"]
    without_effect(options, otherwise if options.shrink else (), _SHRINKS)
    simulation, own = search_of(options), [] if options.plugin is None else loaded(options.plugin)
    simulated = simulation is not None
    if options.list:
        usual = own or ([] if simulated else _all_specimens())
        listed = chosen(options.only, otherwise=usual, device=AUTO, simulated=True)
        Terminal().say(listing(listed, width=Terminal().width))
        return 0
    names = chosen(options.only, otherwise=own, device=options.device, simulated=simulated, shrinks=options.shrink)
    schedules = schedule_names(options.schedule) if options.schedule else []
    setting = Setting(options.device, options.timeout, Outputs.of(options), simulation=simulation)
    counted("--seed", options.seed, least=0, most=MOST_SEED)
    if options.shrink:
        return shrink_all(names, setting, seed=options.seed)
    transport = None if options.transport is None else transport_of(options.transport)
    return try_all(names, schedules, setting, final_only=options.final_only, transport=transport)
