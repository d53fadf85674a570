"""The commands about cases and records, as options: ``validate``, ``fuzz``, ``gate``, ``replay``, ``record`` and so on.

torch is imported by the one that runs, and meanwhile by the fork server where ranks will.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pipeproof.commands.option_parser import UsageError, add, add_flag, refuse_unused, whole
from pipeproof.commands.outputs import Outputs, add_file, add_outputs
from pipeproof.commands.selection import (
    COMPOSED,
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
from pipeproof.commands.simulation_options import add_search, add_simulation, decisions_of, search_of
from pipeproof.commands.work import case_of, work_of
from pipeproof.own.case import DTYPES, FUZZED_DTYPES, SCHEDULES, Case, CaseError
from pipeproof.own.runtimes import OWN, TORCH
from pipeproof.pipeline.files import is_csv
from pipeproof.pipeline.sizes import MOST_ACTIONS, MOST_PROCESSES, MOST_SEED, check_count
from pipeproof.pipeline.transports import transport_of
from pipeproof.reports.terminal import Terminal
from pipeproof.wings import is_present
from pipeproof.worlds.accelerator import AUTO, CPU, parse_device
from pipeproof.worlds.launcher import start_fork_server

Commands: TypeAlias = "argparse._SubParsersAction[Any]"

_NOT_COMPOSED = ("--record", "--profile")  # what a composed check has not
_EVERY = ("all", *SCHEDULES)


def add_case_commands(commands: Commands) -> None:
    """Add the eight commands."""
    for add_command in (_add_validate, _add_replay, _add_fuzz, _add_gate, _add_records, _add_specimens):
        add_command(commands)


def _add_validate(commands: Commands) -> None:
    parser = commands.add_parser(
        "validate",
        help="run schedules beside the reference and compare everything",
        description="Run schedules beside the reference and compare everything: by default every schedule, with a GPT "
        "and with one whose weights are tied.",
    )
    add_table(parser)
    if is_present("primitives"):
        from pipeproof.commands.primitive_commands import add_stacks

        add_stacks(parser)
    add_config(parser)
    add_flag(parser, "--profile", says="print where each rank's time went")
    _add_check(parser)
    add_world(parser)
    add_simulation(parser)
    add_outputs(parser, page=True, record=True)
    parser.set_defaults(run=_validate)


def _add_check(parser: argparse.ArgumentParser) -> None:
    about = "whole: beside a reference on one device; composed: each stage is run again on its own rank"
    add(parser, "--check", None, f"{about} (default: whole)", choices=("whole", COMPOSED), default="whole")


def _add_fuzz(commands: Commands) -> None:
    parser = commands.add_parser("fuzz", help="run many random cases; a failure shrinks to a line that replays it")
    add(parser, "--cases", "N", "how many are drawn", whole, default=200)
    add(parser, "--seed", "N", "one seed draws the same cases again", whole, default=0)
    add(parser, "--schedule", "NAME,...", f"all, or some of {', '.join(SCHEDULES)}", known=_EVERY, default="all")
    add(parser, "--dtype", "NAME,...", DTYPE_NAMES, known=DTYPES, default=",".join(FUZZED_DTYPES))
    add(parser, "--max-ranks", "P", "the most ranks that a drawn case may have", whole, default=4)
    runtimes = "which one runs them: torch is torch.distributed.pipelining"
    add(parser, "--runtime", None, runtimes, choices=(OWN, TORCH), default=OWN)
    add(parser, "--resume", "FILE", "where a long campaign says how far it has come; the same call goes on from there")
    _add_check(parser)
    add_world(parser)
    add_simulation(parser, drawn=True)
    add_outputs(parser, page=True)
    parser.set_defaults(run=_fuzz)


def _add_gate(commands: Commands) -> None:
    about = "decide whether to merge: the table of schedules, fuzzing, and a planted fault"
    parser = commands.add_parser("gate", help=about)
    add_table(parser)
    add(parser, "--cases", "N", "how many are drawn from the seed", whole, default=50)
    add(parser, "--case", "LINE", "one more case, as replay takes it; may be given again", action="append", default=[])
    most = "the most ranks that a drawn case may have (default: as in the table)"
    add(parser, "--max-ranks", "P", most, whole)
    add_file(parser, "--junit", "write a test report there")
    add_file(parser, "--summary", "write a table in Markdown there")
    add(parser, "--artifacts", "DIR", "write the records of failing cases there")
    add(parser, "--annotations", None, "print failures as annotations for GitHub Actions", choices=("github",))
    add_world(parser)
    add_simulation(parser)
    add_outputs(parser, page=True)
    parser.set_defaults(run=_gate)


def _add_replay(commands: Commands) -> None:
    parser = commands.add_parser("replay", help="run one case again, and say all about it")
    line = "the line that a failure printed, e.g. 1f1b r4 s4 m8 split=2,2,2,2 seed=17; quotes may be left out"
    add(parser, "case", None, line, nargs="+")
    add(parser, "--plugin", "FILE", "a Python file that registers the specimen of the line")
    _add_check(parser)
    add_timeout(parser)
    add_simulation(parser)
    add_outputs(parser, what="the verdict", page=True, record=True)
    parser.set_defaults(run=_replay)


def _validate(options: argparse.Namespace) -> int:
    composed = options.check == COMPOSED
    refuse_unused(options, _NOT_COMPOSED, "with --check composed", where=composed)
    if is_present("primitives"):
        from pipeproof.commands.primitive_commands import asks_for_stacks, validate_config, validate_stacks

        if asks_for_stacks(options):
            refuse_unused(options, ["--check"], "with parallel primitives, which are checked whole", where=composed)
            return validate_stacks(options)
    if options.config is None:
        (cases, left_out), device = table_of(options), options.device
    else:
        config = config_of(options)
        work = work_of(config)
        if not isinstance(work, Case):
            return validate_config(options, config, work)
        tell_notes(config, work)
        cases, left_out, device = [work], {}, device_of(options, [config])
    start_fork_server()
    from pipeproof.commands.campaign import Setting, validate_all

    return validate_all(cases, Setting.of(options, device=device), left_out=left_out)


def _gate(options: argparse.Namespace) -> int:
    refuse_unused(options, ["--max-ranks"], "with --cases 0", where=not options.cases)
    table, missing = table_of(options)
    start_fork_server()
    from pipeproof.commands.campaign import Setting
    from pipeproof.commands.gate import Plan, gate

    if options.max_ranks is None:
        options.max_ranks = max(case.ranks for case in table)
    _check_draw(options, least=0)
    families = ",".join(name for name in options.schedule.split(",") if not is_csv(name))
    if options.cases and not families:
        raise CaseError(f"--cases {options.cases} are drawn from families, and --schedule names none: give --cases 0")
    pinned = [Case.parse(text) for text in options.case]
    schedules = schedule_names(families) if families else []
    plan = Plan(table, pinned, schedules, options.cases, options.seed, options.max_ranks, missing)
    return gate(plan, Setting.of(options), options)


def _check_draw(options: argparse.Namespace, *, least: int) -> None:
    """Raise a ``ValueError`` for numbers of what is drawn that cannot be."""
    check_count("--cases", options.cases, least=least, most=MOST_ACTIONS)
    check_count("--max-ranks", options.max_ranks, most=MOST_PROCESSES)
    check_count("--seed", options.seed, least=0, most=MOST_SEED)


def _fuzz(options: argparse.Namespace) -> int:
    other = options.runtime != OWN
    refuse_unused(options, ["--dtype"], "with --runtime torch, which is run in fp32", where=other)
    refuse_unused(options, ["--check"], f"with --runtime {options.runtime}", where=other)
    _check_draw(options, least=1)
    schedules, dtypes = schedule_names(options.schedule), dtype_names(options.dtype)
    start_fork_server()
    from pipeproof.commands.campaign import Setting
    from pipeproof.commands.fuzzing import Wish, fuzz_all

    drawn = (options.cases, options.seed, schedules, dtypes, options.max_ranks, options.runtime)
    return fuzz_all(Setting.of(options), Wish(*drawn, decisions_of(options)), resume=options.resume)


def _replay(options: argparse.Namespace) -> int:
    case = Case.parse(" ".join(options.case))
    refuse_unused(options, _NOT_COMPOSED, "with --check composed", where=options.check == COMPOSED)
    refuse_unused(options, ["--plugin"], "on a line without specimen=", where=not case.specimen)
    start_fork_server()
    from pipeproof.commands.campaign import Setting, validate_all

    if options.plugin is not None:
        from pipeproof.wings.specimens import CATALOGUE

        CATALOGUE.load(options.plugin)
    return validate_all([case], Setting.of(options, device=case.device, explain=True))


def _add_records(commands: Commands) -> None:
    recorder = commands.add_parser("record", help="write what the reference expects of a case, on one device")
    add(recorder, "case", None, "as replay takes it; quotes may be left out", nargs="*")
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
    right = "what `pipeproof record` wrote, or the folder of a run that is right"
    observed = (
        "what validate or replay wrote with --record, or the folder of a run; its schedule, P and V may be others"
    )
    third = (
        "the folder of a third run, right but with another order of sums: it measures what rounding does, step by step"
    )
    add(comparer, "expected", None, right)
    add(comparer, "observed", None, observed)
    add(comparer, "--also", "RUN", third)
    add(comparer, "--until", "STEP", "of runs, the last step to compare (default: the last one)", whole)
    differ = commands.add_parser(
        "diff",
        help="what did two runs do differently, and why? configs first, then numbers",
        description="What did two runs do differently, and why? Their configs are compared first, then their numbers. "
        "Then each is judged by what its own config asks for: the difference is an order of sums, another answer that "
        "was asked for, or a fault of one of them. Exit status 0: the same, or no further apart than rounding; 1: "
        "different, or one is wrong by its own config; 3: numbers alone do not decide.",
    )
    add(differ, "expected", "one", "what --record wrote in one run, or `pipeproof record`")
    add(differ, "observed", "other", "what --record wrote in another run")
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

    both = (options.expected, options.observed)
    folders, files = [one for one in both if Path(one).is_dir()], [one for one in both if not Path(one).is_dir()]
    if folders and files:
        raise UsageError(
            f"{folders[0]} is a folder, and {files[0]} is none: expected two runs, which are folders that record_run "
            "wrote, or two records, which are files"
        )
    refuse_unused(options, ["--also", "--until"], "on records, which are files", where=not folders)
    if files:
        return compare_files(*both, outputs=Outputs.of(options))
    if options.until is not None:
        check_count("--until", options.until, least=0, most=MOST_ACTIONS)
    return compare_folders(*both, also=options.also, until=options.until, outputs=Outputs.of(options))


def _diff(options: argparse.Namespace) -> int:
    from pipeproof.commands.offline import diff_files

    return diff_files(options.expected, options.observed, outputs=Outputs.of(options))


def _add_specimens(commands: Commands) -> None:
    parser = commands.add_parser("specimens", help="plant known faults; see that each is caught and named")
    add_flag(parser, "--list", says="a line for each; nothing runs")
    there = "plant each on these schedules, or on all, and not in its smallest case"
    add(parser, "--schedule", "NAME,...", there, known=_EVERY, default="")
    add(parser, "--only", "NAME,...", "these specimens alone (default: all)", known=_all_specimens, default="")
    where = "the type of device that ranks compute on (default: cpu); another one shows more faults than the CPU does"
    add(parser, "--device", "TYPE", where, parse_device, default=CPU)
    add_search(parser)
    own = "a Python file that registers specimens of your own: those alone, unless --only says more"
    add(parser, "--plugin", "FILE", own)
    add_flag(parser, "--shrink", says="shrink a random failing case of each to its smallest")
    add(parser, "--seed", "N", "one seed lets --shrink draw the same cases again", whole, default=0)
    add_flag(parser, "--final-only", says="name faults from final gradients alone: record no tensors")
    add_timeout(parser)
    add_outputs(parser, what="results")
    parser.set_defaults(run=_specimens)


def _all_specimens() -> Sequence[str]:
    from pipeproof.wings.specimens import specimens_on

    return specimens_on(AUTO, simulated=True)


def _specimens(options: argparse.Namespace) -> int:
    from pipeproof.commands.campaign import Setting
    from pipeproof.commands.catalogue import shrink_all, try_all
    from pipeproof.wings.specimens import choose, listing, load

    places = ("--schedule", "--device", "--transport", "--interleavings", "--final-only")
    runs = (*places, "--shrink", "--seed", "--timeout", "--json")
    refuse_unused(options, runs, "with --list, which runs nothing", where=options.list)
    refuse_unused(options, ["--seed"], "without --shrink", where=not options.shrink)
    why = "with --shrink, which draws its own schedules and names nothing"
    refuse_unused(options, (*places, "--world"), why, where=options.shrink)
    simulation, own = search_of(options), [] if options.plugin is None else load(options.plugin)
    simulated = simulation is not None
    if options.list:
        usual = own or ([] if simulated else _all_specimens())
        listed = choose(options.only, otherwise=usual, device=AUTO, simulated=True)
        Terminal().say(listing(listed, width=Terminal().width))
        return 0
    names = choose(options.only, otherwise=own, device=options.device, simulated=simulated, shrinks=options.shrink)
    schedules = schedule_names(options.schedule) if options.schedule else []
    setting = Setting(options.device, options.timeout, Outputs.of(options), simulation=simulation)
    check_count("--seed", options.seed, least=0, most=MOST_SEED)
    if options.shrink:
        return shrink_all(names, setting, seed=options.seed)
    transport = None if options.transport is None else transport_of(options.transport)
    return try_all(names, schedules, setting, final_only=options.final_only, transport=transport)
