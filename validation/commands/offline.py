"""What the commands ``record`` and ``compare`` do: no rank is started."""

from argparse import Namespace
from dataclasses import replace
from functools import partial

from pipeproof.commands.ending import WRONG
from pipeproof.commands.outputs import Outputs
from pipeproof.core.verdict import JUDGED, Verdict
from pipeproof.own.case import Case
from pipeproof.own.faults import specimen
from pipeproof.pipeline.sizes import some
from pipeproof.records.case_record import record_expected
from pipeproof.records.compare import RUNS, compare
from pipeproof.records.difference import difference, other_steps
from pipeproof.records.record import OtherSteps, Record, RecordError, config_differences
from pipeproof.records.record_file import read, write
from pipeproof.reports.columns import Column, table
from pipeproof.reports.page.page import page
from pipeproof.reports.terminal import Terminal

_CONFIGS = (Column("config"), Column("one"), Column("other"))


def record_case(case: Case, path: str, outputs: Outputs) -> int:
    """Write what a correct run of ``case`` gives; returns the exit status."""
    if specimen(case.specimen).name:
        raise RecordError(f"{case.specimen!r} is planted in ranks: what is expected has no specimen; leave it out")
    if case.replicas > 1:
        raise RecordError(f"a record is of one pipeline, and {case} has {case.replicas} replicas: leave them out")
    terminal = Terminal()
    with terminal.progress(f"the reference of {case}"):
        record = record_expected(case)
    write(record, outputs.files["record"])
    losses = some(sum(len(one.losses) for one in record.operations), "loss")
    gradients = some(sum(len(one.gradients) for one in record.operations), "gradient")
    operations = "+".join(one.operation for one in record.operations)
    terminal.say(f"{path}: {record.kind} of {record.name}: {operations}; {losses}, {gradients}")
    return 0


def compare_files(options: Namespace) -> int:
    """Judge the record in one file by that in another; returns the exit status.

    With ``why``, and of two runs, which both may be wrong: first say how their configs differ, and then why the numbers
    do.
    """
    names = (options.expected, options.observed)
    first, second = map(read, names)
    if options.why or first.kind == "observed":
        return _compare_runs(first, second, names, options.outputs)
    return _show(compare(first, second, rerun=f"pipeproof compare {names[0]} {names[1]}"), options.outputs)


def compare_folders(options: Namespace) -> int:
    """Say where the run in one folder parts from that in another, which is right; returns the exit status.

    ``also``: the folder of a third one, which measures rounding. ``until``: the last step.
    """
    from pipeproof.wings.runs import compare_runs

    with Terminal().progress("steps") as progress:
        third, until = options.also, options.until
        verdict = compare_runs(options.expected, options.observed, third=third, until=until, progress=progress)
    return _show(verdict, options.outputs)


def _show(verdict: Verdict, outputs: Outputs) -> int:
    Terminal().verdict(verdict)
    return outputs.finish(verdict.exit_status, [verdict], page=partial(page, verdict))


def _compare_runs(first: Record, second: Record, names: tuple[str, str], outputs: Outputs) -> int:
    """Say what is different in two records, the configs first, and why; returns the exit status.

    Raises ``OtherSteps`` where numbers cannot be compared, and the configs do not explain it.
    """
    differences, terminal = [*config_differences(first, second)], Terminal()
    judged = first.kind == "expected"
    rerun = f"pipeproof compare {names[0]} {names[1]}{' --why' * judged}"
    with terminal.progress("what each config asks for, on one device"):
        try:
            verdict = compare(first, second, rerun=rerun, sides=JUDGED if judged else RUNS)
            why = difference(first, second, verdict, names)
        except OtherSteps as error:
            why = difference(first, second, error, names)
            if why.reason not in ("asked", "fault"):
                raise
            verdict = replace(other_steps(error), config=f"{first.name} and {second.name}", rerun=rerun)
    rows = [tuple(str(part) or "-" for part in row) for row in differences]
    terminal.say(table(_CONFIGS, rows, terminal.width) if rows else "the configs are the same")
    terminal.verdict(verdict)
    status = WRONG if why.reason == "fault" else verdict.exit_status
    terminal.tell("\n".join(f"  {name:<9} {text}" for name, text in why.rows), passed=status == 0)
    found = {name: values for name, *values in differences}
    shown = partial(page, verdict, configs=differences, why=why.rows)
    return outputs.finish(status, [verdict], page=shown, config_differences=found, difference=why.as_dict())
