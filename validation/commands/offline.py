"""What the commands ``record``, ``compare`` and ``diff`` do: no rank is started."""

from collections.abc import Iterator

from validation.cases.case import Case
from validation.cases.specimens import specimen
from validation.judging.verdict import Verdict
from validation.records.case_record import expected_record
from validation.records.compare import compare
from validation.records.record import Record, RecordError, config_differences
from validation.records.record_file import read, write
from validation.reports.terminal import JsonFile, Terminal
from validation.worlds.output_file import OutputFile


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


def compare_files(expected: str, seen: str, *, json: str | None) -> int:
    """Judge the record in one file by that in another; returns the exit status."""
    with JsonFile(json) as file:
        verdict = compare(read(expected), read(seen), rerun=f"pipeproof compare {expected} {seen}")
        file.write(verdict.as_dict())
    return _said(verdict)


def diff_files(one: str, other: str, *, json: str | None) -> int:
    """What two runs did differently: the configs first, then the numbers; returns the exit status."""
    first, second = read(one), read(other)
    with JsonFile(json) as file:
        Terminal().say("\n".join(_configs(first, second)))
        verdict = compare(first, second, rerun=f"pipeproof diff {one} {other}")
        differences = {name: values for name, *values in config_differences(first, second)}
        file.write({**verdict.as_dict(), "config_differences": differences})
    return _said(verdict)


def _said(verdict: Verdict) -> int:
    Terminal().say(str(verdict), verdict.verdict)
    return verdict.exit_status


def _configs(first: Record, second: Record) -> Iterator[str]:
    found = [(name, str(one), str(other)) for name, one, other in config_differences(first, second)]
    if not found:
        yield "the configs are the same"
        return
    width = max(len(one) for _, one, _ in found)
    yield from (f"{name:<12}  {one:<{width}}  {other}" for name, one, other in found)


def _contents(record: Record) -> str:
    losses = sum(len(one.losses) for one in record.operations)
    gradients = sum(len(one.gradients) for one in record.operations)
    operations = "+".join(one.operation for one in record.operations)
    return f"{record.kind} of {record.name}: {operations}; {losses} losses, {gradients} gradients"
