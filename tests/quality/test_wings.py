"""Wings: each can be taken away, is known by its face alone, and knows no other."""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator

import pytest

from tests.support.sources import INSTALLED, MODULES, OURS, ROOT, Source, imported


def names_on(face: Source) -> Iterator[str]:
    """What stands in the ``__all__`` of a face."""
    for node in face.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from ast.literal_eval(node.value)


WINGS = sorted(path.name for path in (ROOT / "validation" / "wings").iterdir() if (path / "__init__.py").exists())
# Modules that stand on a wing's face: they load when they are wanted, one without the others.
ON_FACES = {
    f"{source.module}.{name}"
    for source in OURS
    if source.path.startswith("validation/wings/") and source.path.endswith("/__init__.py")
    for name in names_on(source)
} & MODULES
STARTERS = "validation.commands.starters."  # files that become a user's own; most want a framework
VERBS = {  # of a wing, which go with it: the command line offers them where it is
    "advise": ["pipeproof.commands.advise"],
    "primitives": ["pipeproof.commands.primitive_commands"],
}

WITHOUT = """
import importlib, sys

wing, *modules = sys.argv[1:]


class Without:
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(f"{wing}."):
            raise ModuleNotFoundError(f"{name} was taken away", name=name)


sys.meta_path.insert(0, Without())
for module in modules:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:  # a framework need not be installed
        if error.name.partition(".")[0] == "pipeproof":
            print(f"{module}: {error}")
"""


def wing_of(module: str) -> str | None:
    """The wing that one of our modules belongs to."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["validation", "wings"] and len(parts) > 2 else None


def past_the_face(source: Source) -> Iterator[str]:
    """Imports of what is inside of a wing, from outside, and of a wing by another."""
    own = wing_of(source.module)
    for line, name in imported(source, MODULES):
        wing = wing_of(name)
        if wing in (None, own):
            continue
        if own is not None:
            yield f"{source.path}, line {line}: the wing {own} imports {name}"
        elif name != f"validation.wings.{wing}" and name not in ON_FACES:
            yield f"{source.path}, line {line}: imports {name}, and not the face of {wing}"


def installed(module: str) -> str:
    """What one of our modules is imported as."""
    for name, folder in INSTALLED.items():
        if f"{module}.".startswith(f"{folder}."):
            return name + module.removeprefix(folder)
    raise AssertionError(module)


def complaints_without(package: str, modules: Collection[str]) -> str:
    """Which of ``modules`` cannot be imported without ``package``, a line each; in a fresh interpreter."""
    run = [sys.executable, "-c", WITHOUT, package, *modules]
    ran = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.sampled(3)
@pytest.mark.long
@pytest.mark.pipeproof_ranks  # it starts processes
@pytest.mark.parametrize("wing", WINGS)
def test_without_a_wing_all_else_is_there(wing: str) -> None:
    others = sorted(installed(one) for one in MODULES if wing_of(one) != wing and not one.startswith(STARTERS))
    there = [one for one in others if one not in VERBS.get(wing, ())]
    assert complaints_without(f"pipeproof.wings.{wing}", there) == ""


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks  # it starts a process
def test_what_cannot_be_taken_away_is_seen() -> None:
    found = complaints_without("pipeproof.pipeline.schedules", ["pipeproof.pipeline.action", "pipeproof.pipeline.plan"])
    assert [line.partition(":")[0] for line in found.splitlines()] == ["pipeproof.pipeline.plan"]


@pytest.mark.long
def test_a_wing_is_imported_by_its_face_alone_and_by_no_other() -> None:
    assert [complaint for source in OURS for complaint in past_the_face(source)] == []


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        (
            "validation/commands/x.py",
            "def f():\n  from pipeproof.wings.runs.file import RankFile",
            "not the face of runs",
        ),
        ("validation/wings/mutate/x.py", "from pipeproof.wings.runs import record_run", "the wing mutate imports"),
        ("validation/wings/runs/x.py", "from pipeproof.wings.runs.file import RankFile", ""),
        ("validation/x.py", "from pipeproof.wings.adapters.megatron import validate", ""),
        ("validation/x.py", "from pipeproof.wings.adapters.megatron_whole import bare", "not the face of adapters"),
        ("validation/__init__.py", "from pipeproof.wings.mutate import mutate", ""),
    ],
)
def test_a_way_past_the_face_is_seen(path: str, text: str, complaint: str) -> None:
    assert complaint in " ".join(past_the_face(Source(path, text)))
    assert bool([*past_the_face(Source(path, text))]) == bool(complaint)
