"""A gate's result as others read it: JUnit, a summary in Markdown, and GitHub's annotations."""

import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from validation.judging.verdict import small
from validation.reports.gate_result import CaseResult, GateResult

_FEW = 3  # annotations of cases; more would hide the culprit
_ROWS = 60  # rows of a table; GitHub shows no more than 1 MiB
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(result: GateResult) -> bytes:
    """One test case for each case, and one that says whether all ran."""
    suite = ElementTree.Element("testsuite", name="pipeproof gate")
    for one in result.cases:
        name = _xml(str(one.case))
        found = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"pipeproof.{one.group}.{one.case.built.name}",
            name=name,
            time=f"{one.verdict.seconds:.3f}",
        )
        if one.outcome != "pass":
            kind = "failure" if one.outcome == "fail" else "error"
            ElementTree.SubElement(found, kind, message=_xml(one.headline)).text = _xml(one.story)
    every = ElementTree.SubElement(suite, "testcase", classname="pipeproof.gate", name="every case ran", time="0")
    if result.short:
        ElementTree.SubElement(every, "error", message=_xml(result.short))
    counted = {
        "tests": len(suite),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
        "time": f"{sum(one.verdict.seconds for one in result.cases):.3f}",
    }
    for name, value in counted.items():
        suite.set(name, str(value))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    text: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def annotations(result: GateResult) -> list[str]:
    """GitHub's commands: a few errors, the culprit first, and how many more there are."""
    found = result.not_passed
    lines = [_error(f"pipeproof: {one.case}", one.story) for one in found[:_FEW]]
    if len(found) > _FEW:
        lines.append(_error("pipeproof", f"{len(found) - _FEW} more cases are no pass: see the job summary"))
    if result.short:
        lines.append(_error("pipeproof: the gate is short", result.short))
    return lines


def markdown(result: GateResult) -> str:
    """The verdicts as a table, what is no pass first, and the screens of the first of these."""
    lines = [f"### pipeproof {result}".replace("|", "\\|"), ""]
    rows = [*result.not_passed, *(one for one in result.cases if one.outcome == "pass")]
    lines += ["| | case | tier | worst error | floor | seconds |", "|---|---|---|--:|--:|--:|"]
    lines += map(_row, rows[:_ROWS])
    if rest := rows[_ROWS:]:
        lines += ["", f"{len(rest)} more, all of them {' or '.join(sorted({one.outcome for one in rest}))}."]
    for one in result.not_passed[:_FEW]:
        lines += ["", *_screen(one)]
    return "\n".join([*lines, ""])


def _row(one: CaseResult) -> str:
    laws = {law.name: law for law in one.verdict.laws}
    gradient = laws.get("gradient")
    worst, floor = "-", "-"
    if gradient is not None:
        worst, floor = small(gradient.worst), small(gradient.floor if gradient.worst else one.verdict.floor)
    outcome = one.outcome if one.outcome == "pass" else f"**{one.outcome}**"
    outcome += ", planted" * (one.group == "planted")
    cells = [outcome, f"`{one.case}`", one.verdict.tier, worst, floor, f"{one.verdict.seconds:.1f}"]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _screen(one: CaseResult) -> Sequence[str]:
    fence = "`" * (3 + max((len(run) for run in re.findall(r"`+", one.story)), default=0))
    return (f"{fence}text", one.story, fence)


def _error(title: str, text: str) -> str:
    return f"::error title={_escaped(title, ',:')}::{_escaped(text)}"


def _escaped(text: str, more: str = "") -> str:
    return "".join(_percents(text, f"%\r\n{more}"))


def _percents(text: str, special: str) -> Iterator[str]:
    for character in text:
        yield f"%{ord(character):02X}" if character in special else character


def _xml(text: str) -> str:
    """``text`` without what XML cannot hold."""
    return _NO_XML.sub("?", text)
