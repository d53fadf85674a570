"""The commands about records, as options: ``record``, ``compare`` and ``diff``."""

import argparse
from typing import Any

from validation.cases.case import Case


def add_record_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the three commands. torch is imported by the one that runs."""
    recorder = commands.add_parser("record", help="write what the reference expects of a case, on one device")
    recorder.add_argument("case", nargs="+", help="as for replay; quotes may be left out")
    recorder.add_argument("--out", required=True, metavar="FILE", help="a safetensors file")
    recorder.set_defaults(run=_record)
    comparer = commands.add_parser("compare", help="judge a record of a run by what was expected, from two files")
    comparer.add_argument("expected", help="what `pipeproof record` wrote")
    comparer.add_argument("seen", help="what --record wrote; schedule, P and V may be others")
    comparer.set_defaults(run=_compare)
    differ = commands.add_parser("diff", help="what two recorded runs did differently: configs first, then numbers")
    differ.add_argument("one")
    differ.add_argument("other")
    differ.set_defaults(run=_diff)
    for parser in (comparer, differ):
        parser.add_argument("--json", metavar="FILE", help="write the verdict there")


def _record(options: argparse.Namespace) -> int:
    from validation.commands.offline import record_case

    return record_case(Case.parse(" ".join(options.case)), options.out)


def _compare(options: argparse.Namespace) -> int:
    from validation.commands.offline import compare_files

    return compare_files(options.expected, options.seen, json=options.json)


def _diff(options: argparse.Namespace) -> int:
    from validation.commands.offline import diff_files

    return diff_files(options.one, options.other, json=options.json)
