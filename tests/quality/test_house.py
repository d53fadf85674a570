"""The house rules as a test. A rule is a function from a source to complaints, and is shown sources that break it."""

import ast
import fnmatch
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pipeline", "reference", "validation")
TOP_LEVEL = {*PACKAGES, "tests", "ci", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
# Test modules that are not about one source module, and what they are about.
NO_SOURCE_MODULE = {
    "house": "the rules that hold for all of it",
    "families": "the numbers of the literature",
    "readme": "the examples of README",
    "train_gpt": "the training example",
    "bad_input": "what cannot be run, differentiated, read or explained",
    "bench": "what ci/bench computes from what it measures",
}

PLAN = set(
    "action schedule schedules columns cells graph dataflow memory laws lower messages transports buffers program_laws "
    "simulate sizes partition grid plan files profile trace deliveries costs chrome_trace".split()
)
FRONT = {"validation.cli", "validation.__main__", "validation.pytest_plugin"}
# Which layers a layer may import, and which distributions (None: whatever pyproject.toml declares).
LAYERS: Mapping[str, set[str]] = {
    "plan": {"plan"},
    "run": {"plan", "run"},
    "reference": {"reference"},
    "validation": {"plan", "run", "reference", "validation"},
    "front": {"plan", "run", "reference", "validation", "front"},
}
OUTSIDE: Mapping[str, set[str] | None] = {"plan": {"numpy"}, "run": {"torch"}, "reference": {"torch"}}

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


def own_parameters(function: Function) -> list[ast.arg]:
    """The parameters that can be passed by position, without self or cls."""
    return [one for one in (*function.args.posonlyargs, *function.args.args) if one.arg not in ("self", "cls")]


def short_files(source: Source) -> Iterator[str]:
    if (count := len(source.text.splitlines())) > 400:
        yield f"has {count} lines, above 400"


def short_functions(source: Source) -> Iterator[str]:
    for function in source.functions:
        if (count := (function.end_lineno or function.lineno) - function.lineno + 1) > 70:
            yield f"{function.name} has {count} lines, above 70"


def few_parameters(source: Source) -> Iterator[str]:
    for function in source.functions:
        count = len(own_parameters(function)) + len(function.args.kwonlyargs)
        if count > 7:
            yield f"{function.name} has {count} parameters, above 7"


def options_by_keyword(source: Source) -> Iterator[str]:
    """At most one parameter with a default can be passed by position; more are keyword-only."""
    for function in source.functions:
        count = len(function.args.defaults)
        if count > 1:
            names = ", ".join(parameter.arg for parameter in own_parameters(function)[-count:])
            yield f"{function.name}: {names} have defaults: all but the first must be keyword-only"


def annotated(source: Source) -> Iterator[str]:
    for function in source.functions:
        rest = filter(None, (function.args.vararg, function.args.kwarg))
        for parameter in (*own_parameters(function), *function.args.kwonlyargs, *rest):
            if parameter.annotation is None:
                yield f"{function.name}: {parameter.arg} is not annotated"
        if function.returns is None:
            yield f"{function.name}: what it returns is not annotated"


def documented(source: Source) -> Iterator[str]:
    """Modules, and what is public at a module's top level."""
    if ast.get_docstring(source.tree) is None:
        yield "has no docstring"
    for node in source.tree.body:
        if isinstance(node, Function | ast.ClassDef) and node.name[0] != "_" and not ast.get_docstring(node):
            yield f"{node.name} has no docstring"


def silent(source: Source) -> Iterator[str]:
    names = (node for node in source.nodes if isinstance(node, ast.Name))
    yield from (f"line {node.lineno} prints" for node in names if node.id == "print")


def asserts_with_words(source: Source) -> Iterator[str]:
    asserts = (node for node in source.nodes if isinstance(node, ast.Assert))
    yield from (f"line {node.lineno} asserts without words" for node in asserts if node.msg is None)


# Written so that they do not match themselves.
MACHINE_PATH = re.compile(r"(?<![\w.}~])/(?:work|home|root|Users|mnt|srv)/\w*")
REGISTRY = re.compile(r"\bpypi[.]\w+|python[h]osted|[i]ndex-url|download[.]pytorch|/simple[/]", re.IGNORECASE)


def portable(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        for match in (*MACHINE_PATH.finditer(line), *REGISTRY.finditer(line)):
            yield f"line {number} names a machine's path or a registry: {match[0]}"


def imported(source: Source, modules: Collection[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions and by ``import_module("...")``."""
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield node.lineno, submodule if submodule in modules else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(arg.value)) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def without_type_checking(source: Source) -> Source:
    """``source`` as it runs: what stands under ``if TYPE_CHECKING`` is left out."""
    if "if TYPE_CHECKING" not in source.text:
        return source
    tree = ast.parse(source.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = [ast.Pass()]
    return Source(source.path, ast.unparse(ast.fix_missing_locations(tree)))


def layer(module: str) -> str | None:
    """The layer of one of our modules; None for everything else."""
    top, _, rest = module.partition(".")
    if top == "pipeline":
        return "plan" if not rest or rest.split(".")[0] in PLAN else "run"
    if top == "validation":
        return "front" if module in FRONT else "validation"
    return top if top == "reference" else None


def declared() -> set[str]:
    """What the distributions that pyproject.toml declares are imported as."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [*project["dependencies"], *project["optional-dependencies"]["plot"]]
    return {re.split(r"[^\w-]", name)[0] for name in names} | {"_pytest", "xdist"}


def arrows(source: Source) -> Iterator[str]:
    """Imports go down the layers only, and outside the standard library only where the layer may."""
    own = layer(source.module)
    assert own is not None, f"{source.path} is in no layer"
    outside = OUTSIDE.get(own) if own in OUTSIDE else declared()
    for _, name in imported(without_type_checking(source), MODULES):
        top, target = name.split(".")[0], layer(name)
        if target is not None:
            if target not in LAYERS[own]:
                yield f"imports {name}: {own} may not import {target}"
        elif top in ("tests", "ci"):
            yield f"imports {name}"
        elif top not in sys.stdlib_module_names and top not in (outside or ()):
            yield f"imports {name}, which {own} may not"


def cycles(found: Collection[Source]) -> list[list[str]]:
    """Groups of modules that import one another, directly or not, in any function."""
    names = {source.module for source in found}
    edges = {source.module: {name for _, name in imported(source, names)} & names for source in found}
    reach = {module: set(targets) for module, targets in edges.items()}
    for middle in names:
        for module in names:
            if middle in reach[module]:
                reach[module] |= reach[middle]
    groups = {tuple(sorted(other for other in reach[module] if module in reach[other])) for module in names}
    return sorted(list(group) for group in groups if group)


def strangers(names: Collection[str], ignored: Collection[str]) -> list[str]:
    """The names that do not belong at the top level: not listed, no dotfile, not ignored by git."""
    patterns = [pattern.rstrip("/") for pattern in ignored if pattern]
    others = (name for name in names if name not in TOP_LEVEL and name[0] != ".")
    return sorted(name for name in others if not any(fnmatch.fnmatch(name, each) for each in patterns))


def orphans(tests: Collection[str], modules: Collection[str]) -> list[str]:
    """Test modules (by what follows ``test_``) that are not named after a module, or package_module."""
    known = {module.split(".")[-1] for module in modules} | {module.replace(".", "_") for module in modules}
    return sorted(test for test in tests if test not in known and test not in NO_SOURCE_MODULE)


OURS = sources(*PACKAGES)
MODULES = {source.module for source in OURS}
EVERY = [*OURS, *sources("tests", "ci")]
QUIET = [source for source in EVERY if not re.match(r"ci/|tests/examples/", source.path)]
TEXTS = [
    Source(str(file.relative_to(ROOT)), file.read_text(errors="replace"))
    for file in sorted(path for name in (*TOP_LEVEL, ".ci") for path in (ROOT / name, *(ROOT / name).rglob("*")))
    if file.is_file() and file.suffix != ".pyc"
]

Rule = Callable[[Source], Iterator[str]]
RULES: Mapping[Rule, list[Source]] = {
    short_files: EVERY,
    short_functions: EVERY,
    few_parameters: EVERY,
    options_by_keyword: OURS,
    annotated: OURS,
    documented: OURS,
    silent: QUIET,
    asserts_with_words: OURS,
    portable: TEXTS,
    arrows: OURS,
}


def broken(rule: Rule, found: Collection[Source]) -> list[str]:
    return [f"{source.path}: {complaint}" for source in found for complaint in rule(source)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Rule) -> None:
    complaints = broken(rule, RULES[rule])
    assert not complaints, "\n".join(complaints)


BROKEN: Mapping[Rule, Mapping[str, list[str]]] = {
    short_files: {"x = 1\n" * 401: ["has 401 lines, above 400"], "x = 1\n" * 400: []},
    short_functions: {
        "def f():\n" + "    x = 1\n" * 70: ["f has 71 lines, above 70"],
        "class C:\n  async def f():\n" + "    x = 1\n" * 70: ["f has 71 lines, above 70"],
    },
    few_parameters: {
        "def f(a, b, c, d, /, e, f, *, g, h): ...": ["f has 8 parameters, above 7"],
        "class C:\n  def f(self, a, b, c, d, e, f, g): ...": [],
    },
    options_by_keyword: {
        "def f(a, b=0, c=1): ...": ["f: b, c have defaults: all but the first must be keyword-only"],
        "class C:\n  def f(self, a=0, b=1): ...": ["f: a, b have defaults: all but the first must be keyword-only"],
        "def f(a, b=0, *, c=1): ...": [],
    },
    annotated: {
        "def f(a, *b, c, **d): ...": [
            *(f"f: {name} is not annotated" for name in "acbd"),
            "f: what it returns is not annotated",
        ],
        "class C:\n  def f(self) -> None: ...": [],
    },
    documented: {
        "def f(): ...\nclass C: ...\ndef _g(): ...": [
            "has no docstring",
            "f has no docstring",
            "C has no docstring",
        ]
    },
    silent: {"def f():\n  print(1)": ["line 2 prints"], "map(print, [])": ["line 1 prints"], "pprint = 1": []},
    asserts_with_words: {"assert x": ["line 1 asserts without words"], "assert x, 'why'": []},
    portable: {
        "x = '/ho" + "me/me/main'": ["line 1 names a machine's path or a registry: /ho" + "me/me"],
        "\n# https://py" + "pi.org/simple": ["line 2 names a machine's path or a registry: py" + "pi.org"],
        "pip install --in" + "dex-url x": ["line 1 names a machine's path or a registry: in" + "dex-url"],
        "a/home/b and https://example.com/work/x": [],
    },
}


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_a_rule_can_be_broken(rule: Rule) -> None:
    for text, complaints in BROKEN[rule].items():
        assert list(rule(Source("pipeline/bad.py", text))) == complaints


def test_every_rule_is_shown_broken() -> None:
    assert {*BROKEN, arrows} == set(RULES)


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("pipeline/laws.py", "import torch", "imports torch, which plan may not"),
        ("pipeline/laws.py", "import rich", "imports rich, which plan may not"),
        ("pipeline/laws.py", "from pipeline import runtime", "imports pipeline.runtime: plan may not import run"),
        ("pipeline/laws.py", "from .stage import Stage", "imports pipeline.stage: plan may not import run"),
        ("pipeline/schedules/new.py", "from ..stage import S", "imports pipeline.stage: plan may not import run"),
        ("pipeline/__init__.py", "from . import step", "imports pipeline.step: plan may not import run"),
        ("pipeline/stage.py", "import reference.model", "imports reference.model: run may not import reference"),
        ("pipeline/stage.py", "def f():\n  import validation", "imports validation: run may not import validation"),
        ("pipeline/stage.py", "import rich", "imports rich, which run may not"),
        ("pipeline/stage.py", "import tests.data", "imports tests.data"),
        ("reference/model.py", "from pipeline import build", "imports pipeline: reference may not import plan"),
        ("reference/step.py", "import_module('validation')", "imports validation: reference may not import validation"),
        (
            "validation/worlds/world.py",
            "import validation.cli",
            "imports validation.cli: validation may not import front",
        ),
        ("validation/worlds/world.py", "import pandas", "imports pandas, which validation may not"),
    ],
)
def test_an_arrow_can_be_broken(path: str, text: str, complaint: str) -> None:
    assert list(arrows(Source(path, text))) == [complaint]


def test_arrows_that_are_fine() -> None:
    typing_only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pipeline.step import StepResult"
    assert list(arrows(Source("pipeline/__init__.py", typing_only))) == []
    everything = "import json, torch, rich\nfrom pipeline.step import P\nfrom reference import model"
    assert list(arrows(Source("validation/worlds/world.py", everything))) == []


def test_no_module_imports_itself_in_a_circle() -> None:
    assert cycles(OURS) == []


def test_a_circle_is_seen_even_inside_functions() -> None:
    a = Source("pipeline/a.py", "from pipeline import b")
    b = Source("pipeline/b.py", "def f():\n    from .c import g")
    c = Source("pipeline/c.py", "import importlib\nimportlib.import_module('pipeline.a')")
    assert cycles([a, b, c]) == [["pipeline.a", "pipeline.b", "pipeline.c"]]
    assert cycles([a, b]) == []


def test_the_top_level_holds_what_it_should() -> None:
    assert strangers([path.name for path in ROOT.iterdir()], (ROOT / ".gitignore").read_text().splitlines()) == []


def test_a_stranger_at_the_top_level_is_seen() -> None:
    names = ["docs", "pipeline", ".ci", "x.egg-info", "build", "setup.py"]
    assert strangers(names, ["*.egg-info/", "build/", ""]) == ["docs", "setup.py"]


def test_every_test_module_is_named_after_what_it_tests() -> None:
    tests = [file.stem.removeprefix("test_") for file in (ROOT / "tests").glob("test_*.py")]
    assert orphans(tests, MODULES) == []


def test_a_test_module_of_nothing_is_seen() -> None:
    assert orphans(["laws", "schedules", "reference_step", "house", "misc"], MODULES) == ["misc"]


def loads_torch(code: str, *, path: Path = ROOT) -> bool:
    """Whether torch is loaded after ``code`` in a fresh interpreter started at ``path``."""
    script = f"{code}\nimport sys\nprint('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], cwd=path, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()[-1] == "True"


def test_drawing_and_checking_do_not_load_torch() -> None:
    use = (
        "s = p.build('1f1b', ranks=2, microbatches=2); p.check(s); p.lower(s); p.grid(p.schedule_from_csv(s.to_csv()))"
    )
    more = "import pipeline.plan, pipeline.program_laws, validation.cli; pipeline.plan.plan(pipeline.plan.Needs(2, 4))"
    assert not loads_torch(f"import pipeline as p, pipeline.partition\n{use}\n{more}")


def test_loading_torch_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")  # a stand-in, which loads at once
    assert loads_torch("import torch", path=tmp_path)
