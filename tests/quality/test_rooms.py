"""Who may import whom: layers, the rooms of validation, no circles; and where files lie."""

import fnmatch
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.golden import golden
from tests.support.sources import MODULES, OURS, ROOT, TOP_LEVEL, Source, imported, without_type_checking

# Folders of tests that mirror no package: what holds for all of it, what guides show, and what ci computes.
MIRROR_NOTHING = ("quality", "examples", "ci", "support", "golden", "frameworks")

PLAN = set(
    "action schedule schedules columns cells graph dataflow memory laws program messages transports deadlock "
    "program_laws symbolic timeline sizes partition text_grid plan files profile trace deliveries costs chrome_trace "
    "mesh mesh_file mesh_sums recorded checked".split()
)
STARTERS = "validation.commands.starters."  # files that become a user's own
FRONT = {"validation.__main__", "validation.pytest_plugin"}
# Which layers a layer may import, and which distributions (None: whatever pyproject.toml declares).
LAYERS: Mapping[str, set[str]] = {
    "plan": {"plan"},
    "run": {"plan", "run"},
    "reference": {"reference"},
    "validation": {"plan", "run", "reference", "validation"},
    "front": {"plan", "run", "reference", "validation", "front"},
}
# numpy in the reference: its random numbers are part of what a stage depends on.
OUTSIDE: Mapping[str, set[str] | None] = {"plan": {"numpy"}, "run": {"torch"}, "reference": {"torch", "numpy"}}
# The rooms of validation, the lowest first: a room imports only rooms before it.
ROOMS = ("core", "explain", "worlds", "whitebox", "own", "records", "reports", "wings", "commands")
LOOSE = 5  # Python files in validation that are in no room, but for one that each framework's users import


def layer(module: str) -> str | None:
    """The layer of one of our modules; None for everything else."""
    top, _, rest = module.partition(".")
    if top == "pipeline":
        return "plan" if not rest or rest.split(".")[0] in PLAN else "run"
    if top == "validation":
        return "front" if module in FRONT or module.startswith(STARTERS) else "validation"
    return top if top == "reference" else None


def declared() -> set[str]:
    """What the distributions that pyproject.toml declares are imported as."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (names for extra, names in project["optional-dependencies"].items() if extra != "dev")
    names = [*project["dependencies"], *(name for names in extras for name in names)]
    found = {re.split(r"[^\w-]", name)[0] for name in names}
    # nanotron is from its repository, for what the index has does not import; colossalai asks for an older torch.
    elsewhere = {"nanotron", "colossalai"}
    return {name.removesuffix("-core") for name in found} | elsewhere | {"_pytest", "xdist"}  # megatron-core: megatron


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


def upwards(source: Source) -> Iterator[str]:
    """Imports, in any function, of a room that comes after one's own."""
    own = room(source.module)
    for line, name in imported(source, MODULES):
        target = room(name)
        if own is not None and target is not None and ROOMS.index(target) > ROOMS.index(own):
            yield f"line {line} imports {name}: {own} comes before {target}"


def room(module: str) -> str | None:
    """The room of one of our modules; None for those in front of all rooms and outside of validation."""
    parts = module.split(".")
    return parts[1] if parts[0] == "validation" and len(parts) > 1 and parts[1] in ROOMS else None


def packages_run(importer: str, name: str, names: Collection[str]) -> set[str]:
    """The packages whose ``__init__`` runs because ``importer`` imports ``name``, but for those that hold it."""
    above = name.split(".")[:-1]
    packages = {".".join(above[: k + 1]) for k in range(len(above))} & set(names)
    return {package for package in packages if not f"{importer}.".startswith(f"{package}.")}


def cycles(found: Collection[Source]) -> list[list[str]]:
    """Groups of modules that import one another, directly or not, in any function, or through a package's own file."""
    names = {source.module for source in found}
    edges: dict[str, set[str]] = {}
    for source in found:
        targets = {name for _, name in imported(source, names)}
        edges[source.module] = targets.union(*(packages_run(source.module, name, names) for name in targets)) & names
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
    """Test files, by their path in tests, that do not lie where the module lies that they are named after.

    ``pipeline/test_step.py`` is about ``pipeline.step``, or about a module of a package in there;
    ``reference/test_reference_step.py`` is for where two modules have one name.
    """
    return sorted(test for test in tests if not any(map(_mirrors(test), modules)))


def _mirrors(test: str) -> Callable[[str], bool]:
    *folders, file = test.removesuffix(".py").split("/")
    name = file.removeprefix("test_")

    def tested(module: str) -> bool:
        *above, own = module.split(".")
        return above[: len(folders)] == folders and name in (own, f"{folders[-1]}_{own}" if folders else own)

    return tested


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
            "import validation.__main__",
            "imports validation.__main__: validation may not import front",
        ),
        ("validation/worlds/world.py", "import pandas", "imports pandas, which validation may not"),
    ],
)
def test_an_arrow_can_be_broken(path: str, text: str, complaint: str) -> None:
    assert list(arrows(Source(path, text))) == [complaint]


def test_arrows_that_are_fine() -> None:
    typing_only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pipeline.step import ScheduleResult"
    assert list(arrows(Source("pipeline/__init__.py", typing_only))) == []
    everything = "import json, torch, rich\nfrom pipeline.step import P\nfrom reference import model"
    assert list(arrows(Source("validation/worlds/world.py", everything))) == []


@pytest.mark.long
def test_imports_go_down_the_layers() -> None:
    complaints = [f"{source.path}: {complaint}" for source in OURS for complaint in arrows(source)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.long
def test_rooms_import_only_rooms_before_them() -> None:
    complaints = [f"{source.path}: {complaint}" for source in OURS for complaint in upwards(source)]
    assert not complaints, "\n".join(complaints)


def test_an_arrow_back_up_is_seen() -> None:
    low = Source("validation/core/x.py", "def f():\n    from validation.own.case import Case")
    golden("\n".join(upwards(low)))
    for detects in ("core", "core/observe"):  # outcomes do not hang on explanations
        explains = Source(f"validation/{detects}/x.py", "import validation.explain.explain")
        (complaint,) = upwards(explains)
        assert complaint.endswith(": core comes before explain")
    high = Source("validation/records/x.py", "from validation.own.case import Case\nimport validation")
    assert list(upwards(high)) == []


def test_every_folder_of_validation_is_a_room_and_few_files_are_in_none() -> None:
    folders = {source.path.split("/")[1] for source in OURS if source.path.count("/") > 1 and source.path[0] == "v"}
    assert folders == set(ROOMS)
    loose = [source.path for source in OURS if source.path.count("/") == 1 and source.path.startswith("validation/")]
    assert len(loose) <= LOOSE, loose


@pytest.mark.long
def test_no_module_imports_itself_in_a_circle() -> None:
    assert cycles(OURS) == []


def test_a_circle_is_seen_even_inside_functions() -> None:
    a = Source("pipeline/a.py", "from pipeline import b")
    b = Source("pipeline/b.py", "def f():\n    from .c import g")
    c = Source("pipeline/c.py", "import importlib\nimportlib.import_module('pipeline.a')")
    assert cycles([a, b, c]) == [["pipeline.a", "pipeline.b", "pipeline.c"]]
    assert cycles([a, b]) == []


def test_a_circle_through_the_file_of_a_package_is_seen() -> None:
    package = Source("validation/whitebox/__init__.py", "from validation.whitebox.validator import validate")
    inside = Source("validation/whitebox/validator.py", "from validation.own.observe import data")
    outside = Source("validation/own/observe.py", "def f():\n    from validation.whitebox.torch import run")
    leaf = Source("validation/whitebox/torch.py", "run = 1")
    circle = ["validation.own.observe", "validation.whitebox", "validation.whitebox.validator"]
    assert cycles([package, inside, outside, leaf]) == [circle]
    assert cycles([package, inside, leaf]) == []


def test_the_top_level_holds_what_it_should() -> None:
    assert strangers([path.name for path in ROOT.iterdir()], (ROOT / ".gitignore").read_text().splitlines()) == []


def test_a_stranger_at_the_top_level_is_seen() -> None:
    names = ["docs", "pipeline", ".ci", "x.egg-info", "build", "setup.py"]
    assert strangers(names, ["*.egg-info/", "build/", ""]) == ["docs", "setup.py"]


def test_tests_mirror_the_packages() -> None:
    files = [str(file.relative_to(ROOT / "tests")) for file in (ROOT / "tests").rglob("test_*.py")]
    assert orphans([file for file in files if file.split("/")[0] not in MIRROR_NOTHING], MODULES) == []


def test_no_two_test_files_have_one_name() -> None:
    """Pytest imports them by that."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_test_of_nothing_is_seen() -> None:
    tests = ["pipeline/test_laws.py", "reference/test_reference_step.py", "pipeline/test_step.py", "test_misc.py"]
    found = orphans([*tests, "reference/test_laws.py"], ["pipeline.laws", "pipeline.step", "reference.step"])
    assert found == ["reference/test_laws.py", "test_misc.py"]


def loaded(code: str, *, path: Path = ROOT) -> list[str]:
    """The modules that are loaded after ``code`` in a fresh interpreter started at ``path``."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], cwd=path, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()[-1].split()


def loads_torch(code: str, *, path: Path = ROOT) -> bool:
    return "torch" in loaded(code, path=path)


@pytest.mark.pipeproof_ranks  # it starts processes
def test_a_rank_of_the_white_box_loads_no_judge() -> None:
    used = "import pipeproof.whitebox.rank\nfrom pipeproof import StepResult, watch\nStepResult, watch"
    ours = {name for name in loaded(used) if name.startswith("pipeproof.")}
    assert len(ours) <= 90
    late, judge = {"pipeproof.explain.explain"}, {"pipeproof.whitebox.validator", "pipeproof.core.judge"}
    assert (late | judge) & ours == set()
    found = {*loaded("from pipeproof import whitebox\nwhitebox.validate")}
    assert judge <= found
    assert late & found == set(), "it is loaded where something is wrong"


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks  # it starts processes
def test_the_version_is_told_without_what_commands_need() -> None:
    told = "import sys, pipeproof.__main__ as m\nsys.argv[1:] = ['--version']\ntry: m.start()\nexcept SystemExit: pass"
    assert not {"numpy", "pipeproof.commands.cli"} & {*loaded(told)}


@pytest.mark.pipeproof_ranks  # it starts processes
def test_drawing_and_checking_do_not_load_torch() -> None:
    use = "import pipeproof, pipeproof.pipeline as p\ns = p.build('1f1b', ranks=2, microbatches=2)\n"
    use += "p.check(s); p.lower(s); p.grid(p.schedule_from_csv(s.to_csv()))\n"
    use += "import pipeproof.commands.cli, pipeproof.wings.advise\n"
    use += "import pipeproof.pipeline.program_laws as _; from pipeproof.pipeline import plan; "
    use += "plan.plan(plan.Needs(2, 4))"
    assert not loads_torch(use)


def test_loading_torch_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")  # a stand-in, which loads at once
    assert loads_torch("import torch", path=tmp_path)
