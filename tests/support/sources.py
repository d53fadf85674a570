"""The project's own files, as the tests of the house read them."""

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pipeline", "reference", "validation")
# What is installed is one package: pyproject.toml maps the folders into it. Here modules are called by their folders.
INSTALLED = {"pipeproof.pipeline": "pipeline", "pipeproof.reference": "reference", "pipeproof": "validation"}
TOP_LEVEL = {*PACKAGES, "tests", "ci", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A text file of the project, by its path from the top."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """``pipeline.laws``; the package's own name for an ``__init__``."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]


def sources(*folders: str) -> list[Source]:
    """Every Python file under ``folders``."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [Source(str(file.relative_to(ROOT)), file.read_text()) for file in files]


def imported(source: Source, modules: Collection[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions and by ``import_module("...")``."""
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, in_folder(alias.name)) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                submodule = in_folder(f"{base}.{alias.name}")
                yield node.lineno, submodule if submodule in modules else in_folder(base)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))
            yield from ((node.lineno, in_folder(name)) for name in names)


def in_folder(name: str) -> str:
    """What a module that is imported by ``name`` is called here."""
    for package, folder in INSTALLED.items():
        if f"{name}.".startswith(f"{package}."):
            return folder + name.removeprefix(package)
    return name


def without_type_checking(source: Source) -> Source:
    """``source`` as it runs: what stands under ``if TYPE_CHECKING`` is left out."""
    if "if TYPE_CHECKING" not in source.text:
        return source
    tree = ast.parse(source.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = [ast.Pass()]
    return Source(source.path, ast.unparse(ast.fix_missing_locations(tree)))


OURS = sources(*PACKAGES)
MODULES = {source.module for source in OURS}
EVERY = [*OURS, *sources("tests", "ci")]
QUIET = [source for source in EVERY if not re.match(r"ci/|tests/examples/", source.path)]
TEXTS = [
    Source(str(file.relative_to(ROOT)), file.read_text(errors="replace"))
    for file in sorted(path for name in (*TOP_LEVEL, ".ci") for path in (ROOT / name, *(ROOT / name).rglob("*")))
    if file.is_file() and file.suffix != ".pyc"
]
