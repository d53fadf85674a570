"""The guide to the public API, made from the code: names with signatures, a sentence each, and one for each argument.

The code is read, not imported, so that a page does not depend on who makes it. Docstrings say more.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "validation" / "guides" / "reference.md"
BEGIN, END = "<!-- from the code: ci/reference -->\n", "<!-- end -->\n"
Node = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Name:
    """A public name: where users import it, where it is written, and which of its methods they call."""

    package: str
    name: str
    file: str
    own: str = ""  # what it is called there, if that is another name; or the class that it has its fields of
    methods: Sequence[str] = field(default=())
    briefly: bool = False  # its arguments are explained at another name
    guide: str = ""  # what explains it; names with one guide are shown together
    returned: bool = False  # users get one from another name, and do not call it


VERDICT = ("exit_status", "details", "raise_if_failed", "law", "as_dict")
SCHEDULE = (
    "train_step",
    "accumulate",
    "eval_step",
    "wrap",
    "profiles",
    "trace",
    "executed",
    "undeferred",
)
ADAPTERS = "validation/wings/adapters"
FRAMEWORKS = ("megatron", "colossalai", "deepspeed", "torchtitan", "nanotron", "transformers")
JOBS = {"transformers": "transformers_trainer"}  # where steps of running jobs are, if that is another file
STEPS, JOB_STEPS = ("validate", "observe"), ("check_step", "record_step")
PARTS: Mapping[str, Sequence[Name]] = {
    "Your own step": (
        Name("pipeproof.whitebox", "validate", "validation/whitebox/validator.py", briefly=True),
        Name("pipeproof", "Contract", "validation/core/contract.py"),
        Name("pipeproof.whitebox", "WhiteBox", "validation/whitebox/validator.py", methods=("validate", "fuzz")),
        Name("pipeproof.whitebox", "fuzz", "validation/whitebox/validator.py"),
        Name("pipeproof.whitebox", "Campaign", "validation/whitebox/space.py"),
        Name("pipeproof.whitebox", "StepCase", "validation/whitebox/space.py"),
        Name(
            "pipeproof.whitebox",
            "FuzzResult",
            "validation/whitebox/fuzzing.py",
            methods=("cases", "replay", "raise_if_failed"),
        ),
        Name("pipeproof.whitebox", "mutate", "validation/wings/mutate/mutation.py"),
        Name("pipeproof.whitebox", "under_test", "validation/wings/mutate/mutation.py"),
        Name("pipeproof.whitebox", "LetPass", "validation/wings/mutate/mutation.py"),
        Name(
            "pipeproof.whitebox",
            "Mutated",
            "validation/wings/mutate/mutation.py",
            methods=("let_pass", "raise_if_any_passed"),
        ),
        Name("pipeproof", "watch", "validation/core/observe/watching.py"),
        Name("pipeproof.whitebox", "Operation", "validation/whitebox/handed_back.py"),
        Name("pipeproof", "StepResult", "validation/whitebox/handed_back.py"),
        Name("pipeproof.whitebox", "FlatShard", "validation/whitebox/handed_back.py"),
        Name("pipeproof.whitebox.torch_pipelining", "step", "validation/whitebox/torch_pipelining.py"),
    ),
    "A running job": (
        Name("pipeproof", "check_step", "validation/records/step_check.py"),
        Name(
            "pipeproof.records.checked_step",
            "CheckedStep",
            "validation/records/checked_step.py",
            methods=("gradients", "report", "wrap", "verdict"),
            returned=True,
        ),
        Name("pipeproof", "SingleDevice", "validation/records/single_device.py"),
        Name("pipeproof", "StageByStage", "validation/wings/composed/composed.py", own="AgainstItself"),
        Name("pipeproof", "log_verdict", "validation/records/dashboard.py"),
        Name("pipeproof", "record_step", "validation/records/step_record.py"),
        Name("pipeproof", "write_record", "validation/records/step_record.py"),
        Name("pipeproof", "record_run", "validation/wings/runs/recorder.py"),
        Name(
            "pipeproof.wings.runs", "RunRecorder", "validation/wings/runs/recorder.py", methods=("step",), returned=True
        ),
        Name(
            "pipeproof.wings.runs",
            "RunStep",
            "validation/wings/runs/recorder.py",
            methods=("gradients", "report", "wrap"),
            returned=True,
        ),
    ),
    "Frameworks": (
        *(
            Name("pipeproof", f"{one}.{name}", f"{ADAPTERS}/{file}.py", own=name, guide=one)
            for one in FRAMEWORKS
            for file, names in ((one, STEPS), (JOBS.get(one, one), JOB_STEPS))
            for name in names
        ),
        Name("pipeproof", "megatron.imports", f"{ADAPTERS}/framework.py", own="imports"),
        Name("pipeproof", "transformers.Stage", f"{ADAPTERS}/transformers_stage.py", own="Stage"),
    ),
    "Verdicts": (
        Name("pipeproof", "Verdict", "validation/core/verdict.py", methods=VERDICT, returned=True),
        Name("pipeproof.core.verdict", "LawResult", "validation/core/findings.py"),
        Name("pipeproof.core.mismatch", "Mismatch", "validation/core/mismatch.py"),
        Name("pipeproof.core.cause", "Cause", "validation/core/cause.py"),
    ),
    "Built-in schedules": (
        Name("pipeproof", "Case", "validation/own/case.py", methods=("parse",)),
        Name("pipeproof", "validate", "validation/own/validator.py"),
        Name("pipeproof", "PipelineSchedule", "pipeline/step.py", methods=SCHEDULE),
        Name("pipeproof.pipeline", "ScheduleResult", "pipeline/step.py"),
        Name("pipeproof.pipeline", "build", "pipeline/schedules/__init__.py"),
        Name("pipeproof.pipeline", "check", "pipeline/laws.py"),
        Name("pipeproof.pipeline", "lower", "pipeline/program.py"),
        Name("pipeproof.pipeline", "simulate", "pipeline/timeline.py"),
        Name("pipeproof.pipeline", "grid", "pipeline/text_grid.py"),
        Name("pipeproof.pipeline", "read_file", "pipeline/files.py"),
        Name("pipeproof.pipeline", "schedule_from_csv", "pipeline/schedule.py"),
        Name("pipeproof.pipeline", "program_from_csv", "pipeline/program.py"),
        Name("pipeproof.pipeline", "Schedule", "pipeline/schedule.py"),
        Name("pipeproof.pipeline", "Program", "pipeline/program.py"),
        Name("pipeproof.pipeline", "Action", "pipeline/action.py"),
    ),
    "Ranks": (
        Name("pipeproof", "World", "validation/worlds/world.py", methods=("run", "close")),
        Name("pipeproof", "SimulatedWorld", "validation/wings/simulated/world.py"),
    ),
}


def found(body: Sequence[ast.stmt], name: str) -> Node:
    """The function or class called ``name``, or else the method that is alone in being called so."""
    methods = [one for node in body if isinstance(node, ast.ClassDef) for one in node.body]
    here, inside = ([one for one in part if isinstance(one, Node) and one.name == name] for part in (body, methods))
    (node,) = here or inside
    return node


def signature(node: Node, name: str, *, types: bool = True) -> str:
    """How ``node`` is called, one argument a line where that is long. A dataclass is called with its fields."""
    given, returns = parameters(node), ""
    if not types:
        given = [re.sub(r":.*?(?: = (.*))?$", lambda found: f"={found[1]}" if found[1] else "", one) for one in given]
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        if any(ast.unparse(one) in ("property", "cached_property") for one in node.decorator_list):
            return f"{name}{returns.replace(' ->', ':')}"
    line = f"{name}({', '.join(given)}){returns}"
    return (
        line
        if len(line) <= (100 if types else 120)
        else f"{name}(\n" + "".join(f"    {one},\n" for one in given) + f"){returns}"
    )


def parameters(node: Node) -> list[str]:
    """What ``node`` is called with; a dataclass with its fields."""
    if isinstance(node, ast.FunctionDef):
        return arguments(node)
    made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    return arguments(made[0]) if made else fields(node)


def arguments(node: ast.FunctionDef) -> list[str]:
    """The arguments of a function, without ``self``."""
    parts, depth = [""], 0
    for letter in ast.unparse(node.args):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    parts = [part.strip() for part in parts if part]
    return [part.replace("=", " = ") for part in parts if part not in ("self", "cls")]


def fields(node: ast.ClassDef) -> list[str]:
    """The fields of a dataclass or a named tuple."""
    rows = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    return [
        re.sub(r"field\(default=(.+?), \w+=\w+\)", r"\1", ast.unparse(row))
        for row in rows
        if row.simple and not ast.unparse(row).startswith("_")
    ]


def docstring(node: Node) -> str:
    """The docstring, and that of ``__init__``, with the arguments as a list."""
    own = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        own = "\n\n".join(filter(None, [own, *(ast.get_docstring(one) or "" for one in made)]))
    return listed(
        inspect.cleandoc(own).replace("``", "`"), [part.split(":")[0].strip("*") for part in parameters(node)]
    )


def listed(text: str, names: Sequence[str]) -> str:
    """``text`` with an item of a list for each of ``names`` that it explains: ``name: what it is.``"""
    explained = rf"(?:^|(?<=\. ))({'|'.join(map(re.escape, names)) or '$'}): "
    paragraphs = []
    for paragraph in text.split("\n\n"):
        before, *items = re.split(explained, " ".join(paragraph.split()))
        rows = [f"- `{name}`: {what.strip()}" for name, what in zip(items[::2], items[1::2], strict=True)]
        listing = "\n".join(fill(row, 120, subsequent_indent="  ", break_on_hyphens=False) for row in rows)
        paragraphs += filter(None, [fill(before.strip(), 120, break_on_hyphens=False), listing])
    return "\n\n".join(paragraphs)


FEW = 7  # words: a shorter sentence is followed by the next
SENTENCE = re.compile(r".*?(?<!e\.g)[.:](?=\s+(?:[A-Z`]|- )|\s*$)", re.DOTALL)


def shortened(text: str, *, arguments: bool = True) -> str:
    """The first sentence of ``text``, and of each item of its list."""
    first, *rest = text.split("\n\n")
    items = [row for part in (first, *rest) if part.startswith("- `") for row in re.split(r"\n(?=- )", part)]
    head = [] if first.startswith("- `") else [sentence(first)]
    return "\n\n".join(filter(None, [*head, "\n".join(map(sentence, items)) if arguments else ""]))


def sentence(text: str) -> str:
    """The first sentence of ``text``, which may begin with the name of an argument."""
    name, colon, rest = text.partition("`: ") if text.startswith("- `") else ("", "", text)
    own = ""
    for found in SENTENCE.finditer(" ".join(rest.split())):
        own += found[0]
        if len(own.split()) >= FEW:
            break
    own = own.rstrip(":").strip()
    return fill(f"{name}{colon}{own}", 120, subsequent_indent="  " if name else "", break_on_hyphens=False)


def entry(one: Name) -> Iterator[str]:
    """What the page says of a name."""
    body = ast.parse((ROOT / one.file).read_text()).body
    node = found(body, one.own or one.name)
    yield f"### {one.name}\n"
    if one.package != "pipeproof":
        yield f"`from {one.package} import {one.name.partition('.')[0]}`\n"
    if not one.returned:
        yield f"```py\n{signature(node, one.name, types=not one.briefly)}\n```\n"
    yield f"{shortened(docstring(node), arguments=not one.briefly)}\n"
    for method in one.methods:
        assert isinstance(node, ast.ClassDef), f"{one.name} is no class and has no methods"
        own = found(node.body, method)
        yield f"```py\n.{signature(own, method, types=False)}\n```\n"
        yield f"{shortened(docstring(own))}\n"


def together(names: Sequence[Name]) -> Iterator[str]:
    """What the page says of names with one guide: how they are called."""
    guide = names[0].guide
    yield f"### [{guide}]({guide}.md)\n\n```py"
    for one in names:
        yield signature(found(ast.parse((ROOT / one.file).read_text()).body, one.own), one.name, types=False)
    yield "```\n"


def page() -> str:
    """All names, part by part."""
    rows = []
    for part, names in PARTS.items():
        rows.append(f"## {part}\n")
        for guide, group in groupby(names, lambda one: one.guide):
            alike = [*group]
            rows += together(alike) if guide else [text for one in alike for text in entry(one)]
    return "\n".join(rows)


def with_names(text: str) -> str:
    """``text`` of the guide, with what the code says now."""
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:start]}\n{page()}\n{text[end:]}"


if __name__ == "__main__":
    PAGE.write_text(with_names(PAGE.read_text()))
