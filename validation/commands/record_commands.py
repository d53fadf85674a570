"""The commands about records, as options: ``record`` and ``compare``. No rank is started."""

import argparse
from pathlib import Path

from pipeproof.commands.case_commands import Commands, own_step
from pipeproof.commands.option_parser import UsageError, add, add_flag, refuse_unused, whole
from pipeproof.commands.outputs import add_file, add_outputs
from pipeproof.commands.own_step import add_step, is_step, step_of
from pipeproof.commands.selection import add_config, config_of, tell_notes
from pipeproof.commands.work import case_of
from pipeproof.own.case import Case
from pipeproof.pipeline.sizes import MOST_ACTIONS, check_count


def add_record_commands(commands: Commands) -> None:
    """Add the commands."""
    recorder = commands.add_parser(
        "record", help="write what the reference expects of a case, or of a step of yours, on one device"
    )
    add(recorder, "case", None, "as replay takes it; quotes may be left out; or a step of yours", nargs="*")
    add_step(recorder, positional=False)
    add_config(recorder)
    add_file(recorder, "--record", "the record to write, a safetensors file", required=True)
    recorder.set_defaults(run=_record)
    comparer = commands.add_parser(
        "compare",
        help="is a run right, and what do two runs do differently? from their records",
        description="Is a run right? Its record is judged by what was expected, under any schedule, as a live run is. "
        "Of two runs that both may be wrong, say what is different: their configs first, then their numbers, and "
        "whether that is an order of sums, another answer that was asked for, or a fault of one of them. Of two "
        "folders that record_run wrote in training loops, the first is taken to be right: say at which step they part, "
        "and by what. Exit status 3: bits differ, and nothing measured tells whether that is rounding.",
    )
    right = "what `pipeproof record` wrote, or what --record wrote in one run, or the folder of a run that is right"
    other = "what --record wrote in another run, or its folder; its schedule, P and V may be others"
    third = (
        "the folder of a third run, right but with another order of sums: it measures what rounding does, step by step"
    )
    add(comparer, "expected", None, right)
    add(comparer, "observed", None, other)
    add_flag(comparer, "--why", says="of records, say first how their configs differ, and then why the numbers do")
    add(comparer, "--also", "RUN", third)
    add(comparer, "--until", "STEP", "of runs, the last step to compare (default: the last one)", whole)
    add_outputs(comparer, what="the verdict", page=True)
    comparer.set_defaults(run=_compare)


def _record(options: argparse.Namespace) -> int:
    if (options.config is None) == (not options.case):
        raise UsageError(f"{options.prog}: expected either a case, or a step, or --config FILE; give one of the two")
    if len(options.case) == 1 and is_step(options.case):
        step = own_step(options, options.case[0], "--record")
        from pipeproof.commands.step_commands import record_own

        assert step is not None, "it is named"
        return record_own(step, options.record)
    step_of(options, None)
    from pipeproof.commands.offline import record_case

    refuse_unused(options, ["--ranks", "--microbatches"], "on a case, which says it")
    if options.config is None:
        return record_case(Case.parse(" ".join(options.case)), options.record, options.outputs)
    config = config_of(options)
    case = case_of(config)
    tell_notes(config, case)
    return record_case(case, options.record, options.outputs)


def _compare(options: argparse.Namespace) -> int:
    from pipeproof.commands.offline import compare_files, compare_folders

    both = (options.expected, options.observed)
    folders = [one for one in both if one and Path(one).is_dir()]
    files = [one for one in both if one not in folders]
    if folders and files:
        raise UsageError(
            f"{folders[0]} is a folder, and {files[0]} is none: expected two runs, which are folders that record_run "
            "wrote, or two records, which are files"
        )
    refuse_unused(options, ["--also", "--until"], "on records, which are files", where=not folders)
    refuse_unused(options, ["--why"], "on folders of runs", where=not files)
    if files:
        return compare_files(options)
    if options.until is not None:
        check_count("--until", options.until, least=0, most=MOST_ACTIONS)
    return compare_folders(options)
