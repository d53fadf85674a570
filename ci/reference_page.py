"""The guide that lists the public API, made from the code: each name with its signature and its docstring.

The code is read, not imported, so that a page does not depend on who makes it.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


VERDICT = ("exit_status", "details", "raise_if_failed", "law", "as_dict")
SCHEDULE = (
    "train_step",
    "accumulate",
    "eval_step",
    "wrap",
    "profiles",
    "trace",
    "schedule",
    "executed",
    "undeferred",
)
ADAPTERS = "validation/wings/adapters"
FRAMEWORKS = ("megatron", "colossalai", "deepspeed", "torchtitan", "nanotron", "transformers")
JOBS = {"transformers": "transformers_trainer"}  # where steps of running jobs are, if that is another file
PARTS: Mapping[str, Sequence[Name]] = {
    "Your own step": (
        Name("pipeproof.whitebox", "validate", "validation/whitebox/validator.py"),
        Name("pipeproof", "Contract", "validation/core/contract.py"),
        Name("pipeproof.whitebox", "WhiteBox", "validation/whitebox/validator.py", methods=("validate",)),
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
        Name("pipeproof", "megatron.imports", f"{ADAPTERS}/framework.py", own="imports"),
        *(
            Name("pipeproof", f"{one}.{name}", f"{ADAPTERS}/{one}.py", own=name)
            for one in FRAMEWORKS
            for name in ("validate", "observe")
        ),
        Name("pipeproof", "transformers.Stage", f"{ADAPTERS}/transformers_stage.py", own="Stage"),
    ),
    "A running job": (
        Name("pipeproof", "check_step", "validation/records/step_check.py"),
        Name(
            "pipeproof.records.checked_step",
            "CheckedStep",
            "validation/records/checked_step.py",
            methods=("gradients", "report", "wrap", "verdict"),
        ),
        Name("pipeproof", "SingleDevice", "validation/records/single_device.py"),
        Name("pipeproof", "StageByStage", "validation/wings/composed/composed.py", own="AgainstItself"),
        *(
            Name("pipeproof", f"{one}.{name}", f"{ADAPTERS}/{JOBS.get(one, one)}.py", own=name)
            for one in FRAMEWORKS
            for name in ("check_step", "record_step")
        ),
        Name("pipeproof", "record_step", "validation/records/step_record.py"),
        Name("pipeproof", "write_record", "validation/records/step_record.py"),
        Name("pipeproof", "record_run", "validation/wings/runs/recorder.py"),
        Name("pipeproof.wings.runs", "RunRecorder", "validation/wings/runs/recorder.py", methods=("step",)),
        Name(
            "pipeproof.wings.runs",
            "RunStep",
            "validation/wings/runs/recorder.py",
            methods=("gradients", "report", "wrap"),
        ),
    ),
    "Verdicts": (
        Name("pipeproof", "Verdict", "validation/core/verdict.py", methods=VERDICT),
        Name("pipeproof.core.findings", "Findings", "validation/core/findings.py", methods=("next", "replay")),
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
        Name("pipeproof.worlds.world", "RankContext", "validation/worlds/worker.py"),
    ),
}


def found(body: Sequence[ast.stmt], name: str) -> Node:
    """The function or class called ``name``, or else the method that is alone in being called so."""
    methods = [one for node in body if isinstance(node, ast.ClassDef) for one in node.body]
    here, inside = ([one for one in part if isinstance(one, Node) and one.name == name] for part in (body, methods))
    (node,) = here or inside
    return node


def signature(node: Node, name: str) -> str:
    """How ``node`` is called, one argument a line where that is long. A dataclass is called with its fields."""
    given, returns = parameters(node), ""
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        if any(ast.unparse(one) in ("property", "cached_property") for one in node.decorator_list):
            return f"{name}{returns.replace(' ->', ':')}"
    line = f"{name}({', '.join(given)}){returns}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {one},\n" for one in given) + f"){returns}"


def parameters(node: Node) -> list[str]:
    """What ``node`` is called with; a dataclass with its fields."""
    if isinstance(node, ast.FunctionDef):
        return arguments(node)
    made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    return arguments(made[0]) if made else fields(node)


def arguments(node: ast.FunctionDef) -> list[str]:
    """The arguments of a function, without ``self``."""
    whole = ast.unparse(node.args)
    parts = re.split(r", (?![^\[(]*[\])])", whole) if whole else []
    return [part.replace("=", " = ") for part in parts if part not in ("self", "cls")]


def fields(node: ast.ClassDef) -> list[str]:
    """The fields of a dataclass or a named tuple."""
    rows = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    return [re.sub(r"field\(default=(.+?), \w+=\w+\)", r"\1", ast.unparse(row)) for row in rows if row.simple]


def told(node: Node) -> str:
    """The docstring, and that of ``__init__``."""
    own = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        own = "\n\n".join(filter(None, [own, *(ast.get_docstring(one) or "" for one in made)]))
    return listed(inspect.cleandoc(own).replace("``", "`"), [part.split(":")[0] for part in parameters(node)])


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


def entry(one: Name) -> Iterator[str]:
    """What the page says of a name."""
    body = ast.parse((ROOT / one.file).read_text()).body
    node = found(body, one.own or one.name)
    yield f"### {one.name}\n\n`from {one.package} import {one.name.partition('.')[0]}`\n"
    yield f"```py\n{signature(node, one.name)}\n```\n"
    yield f"{told(node)}\n"
    for method in one.methods:
        assert isinstance(node, ast.ClassDef), f"{one.name} is no class and has no methods"
        own = found(node.body, method)
        yield f"```py\n.{signature(own, method)}\n```\n"
        yield f"{told(own)}\n"


def page() -> str:
    """All names, part by part."""
    rows = [f"## {part}\n\n" + "\n".join(text for one in names for text in entry(one)) for part, names in PARTS.items()]
    return "\n".join(rows)


def with_names(text: str) -> str:
    """``text`` of the guide, with what the code says now."""
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:start]}\n{page()}\n{text[end:]}"


if __name__ == "__main__":
    PAGE.write_text(with_names(PAGE.read_text()))
