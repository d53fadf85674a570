"""No circles, files where they should lie, what is loaded by whom; and each wing can be taken away."""

import fnmatch
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest
from house_rules import ROOMS, STARTERS, wing_of

from tests.support.sources import INSTALLED, MODULES, OURS, ROOT, TOP_LEVEL, Source, imported

# Folders of tests that mirror no package: what holds for all of it, what guides show, and what ci computes.
MIRROR_NOTHING = ("quality", "examples", "ci", "support", "golden", "frameworks")

LOOSE = 5  # Python files in validation that are in no room, but for one that each framework's users import


def cycles(found: Collection[Source]) -> list[list[str]]:
    """Groups of modules that import one another, directly or not, in any function, or through a package's own file."""
    names = {source.module for source in found}
    edges: dict[str, set[str]] = {}
    for source in found:
        targets = {name for _, name in imported(source, names)}
        # And the packages whose ``__init__`` runs because a module in them is imported, but for those that hold both.
        parts = [name.split(".")[:-1] for name in targets]
        packages = {".".join(above[: k + 1]) for above in parts for k in range(len(above))}
        outside = {package for package in packages if not f"{source.module}.".startswith(f"{package}.")}
        edges[source.module] = (targets | outside) & names
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

    def mirrors(test: str, module: str) -> bool:
        (*folders, file), (*above, own) = test.removesuffix(".py").split("/"), module.split(".")
        names = (own, f"{folders[-1]}_{own}" if folders else own)
        return above[: len(folders)] == folders and file.removeprefix("test_") in names

    return sorted(test for test in tests if not any(mirrors(test, module) for module in modules))


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
    assert "torch" not in loaded(use)


def test_loading_torch_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")  # a stand-in, which loads at once
    assert "torch" in loaded("import torch", path=tmp_path)


WINGS = sorted(path.name for path in (ROOT / "validation" / "wings").iterdir() if (path / "__init__.py").exists())
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
