"""What the commands ``record``, ``compare`` and ``diff`` do: no rank is started."""

from functools import partial

from pipeproof.cases.case import Case
from pipeproof.cases.specimens import specimen
from pipeproof.commands.outputs import Outputs
from pipeproof.judging.verdict import JUDGED
from pipeproof.pipeline.sizes import some
from pipeproof.records.case_record import expected_record
from pipeproof.records.compare import RUNS, compare
from pipeproof.records.record import Record, RecordError, config_differences
from pipeproof.records.record_file import read, write
from pipeproof.reports.columns import Column, table
from pipeproof.reports.page.page import page
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.output_file import OutputFile

_CONFIGS = (Column("config", least=8, gap=0), Column("one", least=4, gap=2), Column("other", least=4, gap=2))


def record_case(case: Case, path: str) -> int:
    """Write what a correct run of ``case`` gives; returns the exit status."""
    if specimen(case.specimen).name:
        raise RecordError(f"{case.specimen!r} is planted in ranks: what is expected has no specimen; leave it out")
    if case.replicas > 1:
        raise RecordError(f"a record is of one pipeline, and {case} has {case.replicas} replicas: leave them out")
    terminal = Terminal()
    with OutputFile(path) as file:
        with terminal.progress(f"the reference of {case}"):
            record = expected_record(case)
        write(record, file)
    terminal.say(f"{path}: {_contents(record)}")
    return 0


def compare_files(expected: str, seen: str, *, outputs: Outputs, configs: bool = False) -> int:
    """Judge the record in one file by that in another; returns the exit status.

    ``configs``: of two runs, say first what is different in their configs.
    """
    first, second = read(expected), read(seen)
    if first.kind == "observed" and not configs:
        wanted = "expected first what `pipeproof record` wrote; of two runs, `pipeproof diff` says what is different"
        raise RecordError(f"{expected} is of a run, which may be wrong: {wanted}")
    command, differences = "diff" if configs else "compare", list(config_differences(first, second))
    with outputs.opened(command) as files:
        sides = JUDGED if first.kind == "expected" else RUNS
        verdict = compare(first, second, rerun=f"pipeproof {command} {expected} {seen}", sides=sides)
        if configs:
            rows = [tuple(str(part) or "-" for part in row) for row in differences]
            Terminal().say(table(_CONFIGS, rows, Terminal().width) if rows else "the configs are the same")
        headline, _, rest = str(verdict).partition("\n")
        Terminal().say(headline, verdict.word)
        (Terminal().detail if verdict.verdict == "pass" else Terminal().say)(rest)
        found = {name: values for name, *values in differences}
        shown = partial(page, verdict, differences if configs else ())
        return files.finish(verdict.exit_status, [verdict], page=shown, config_differences=found)


def _contents(record: Record) -> str:
    losses = some(sum(len(one.losses) for one in record.operations), "loss")
    gradients = some(sum(len(one.gradients) for one in record.operations), "gradient")
    operations = "+".join(one.operation for one in record.operations)
    return f"{record.kind} of {record.name}: {operations}; {losses}, {gradients}"
