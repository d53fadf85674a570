"""What adapters of frameworks share: versions, options, ranks and weights, and the sentences for what is wrong."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from pipeproof.whitebox.validator import WhiteBox, validate
from pipeproof.wings.adapters import framework
from pipeproof.wings.adapters.framework import AdapterError, Framework
from pipeproof.wings.adapters.whole import under_name_of
from pipeproof.worlds.shipping import FIRST

TINY = Framework("tiny-core", "tiny.core", ("0.16", "0.17"), "pip install tiny-core")


def test_what_is_not_installed_is_said_with_its_cure() -> None:
    with pytest.raises(AdapterError, match=r"^tiny-core is not installed: pip install tiny-core$"):
        TINY.module()


@pytest.mark.parametrize(("version", "known"), [("0.16.1", True), ("0.17.0", True), ("0.1.2", False), ("0.160", False)])
def test_a_version_is_known_or_named(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("tiny.core")
    package.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tiny", ModuleType("tiny"))
    monkeypatch.setitem(sys.modules, "tiny.core", package)
    if known:
        assert TINY.module() is package
    else:
        with pytest.raises(AdapterError, match=rf"^tiny-core is {version}: this pipeproof knows 0.16, 0.17"):
            TINY.module()


def test_what_the_framework_itself_lacks_is_not_the_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny" / "core").mkdir(parents=True)
    (tmp_path / "tiny" / "core" / "__init__.py").write_text("import no_such_module_of_tiny")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_tiny"):
        TINY.module()
    sys.modules.pop("tiny", None)


def test_its_imports_say_in_one_sentence_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AdapterError, match=r"^tiny-core is not installed: pip install tiny-core$"), TINY.imports():
        pass
    (tmp_path / "tiny" / "core").mkdir(parents=True)
    (tmp_path / "tiny" / "core" / "__init__.py").write_text("__version__ = '0.16'")
    (tmp_path / "tiny" / "core" / "kernels.py").write_text("import no_such_module_of_tiny")
    monkeypatch.syspath_prepend(tmp_path)
    sentence = r"^tiny-core needs no_such_module_of_tiny, which is not installed: pip install tiny-core$"
    with pytest.raises(AdapterError, match=sentence), TINY.imports():
        import_module("tiny.core.kernels")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_the_user"), TINY.imports():
        import_module("no_such_module_of_the_user")
    for name in [one for one in sys.modules if one.partition(".")[0] == "tiny"]:
        del sys.modules[name]


@pytest.mark.parametrize("gpu", [False, True])
def test_without_a_gpu_it_runs_here_and_on_ranks(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: gpu or None)
    monkeypatch.setattr(framework, "validated", lambda: list(FIRST))  # what ranks do first
    monkeypatch.setattr(framework, "_ON_CPU", set())
    ran: list[str] = []
    tiny = replace(TINY, shim=lambda: ran.append("shim"))
    assert tiny.judge(None)() == []  # nobody asked for it
    tiny.on_cpu()
    assert ran == ([] if gpu else ["shim"])
    for prepare in tiny.judge(None)():
        prepare()  # type: ignore[operator]  # not a verdict, here
    assert ran == ([] if gpu else ["shim", "shim"])
    assert FIRST == []


def test_an_option_that_is_not_covered_is_named() -> None:
    TINY.covers({"a": 1, "other": 5}, {"a": 1, "b": False})
    with pytest.raises(AdapterError, match=r"^a is 2: pipeproof.tiny covers 1 only; set it so for the check$"):
        TINY.covers({"a": 2}, {"a": 1})


def test_an_axis_that_is_not_covered_is_named() -> None:
    with pytest.raises(AdapterError, match="ranks has the axis 'tp'"):
        TINY.mesh({"pp": 2, "tp": 2})
    assert [*TINY.mesh({"dp": 2, "pp": 3}).items()] == [("pp", 3), ("dp", 2)]  # type: ignore[union-attr]  # given so
    assert TINY.mesh(3) == 3


def test_parameters_get_the_weights_of_the_reference() -> None:
    stage, reference = nn.Linear(2, 3), nn.Linear(2, 3)
    TINY.load([("weight", stage.weight)], reference)
    assert stage.weight.equal(reference.weight)
    assert not stage.bias.equal(reference.bias)


@pytest.mark.parametrize(
    ("name", "reference", "has"),
    [
        ("gain", nn.Linear(2, 3), "none"),
        ("weight", nn.Linear(3, 2), r"one of shape \[2, 3\] in float32"),
        ("weight", nn.Linear(2, 3, dtype=torch.bfloat16), r"one of shape \[3, 2\] in bfloat16"),
    ],
)
def test_a_parameter_that_the_reference_has_not_so_is_said(name: str, reference: nn.Module, has: str) -> None:
    sentence = rf"^a stage has a parameter {name} of shape \[3, 2\] in float32, the reference has {has}: build both"
    with pytest.raises(AdapterError, match=sentence):
        TINY.load([(name, nn.Linear(2, 3).weight)], reference)


def test_what_is_run_is_called_what_the_user_calls_it() -> None:
    def build_model() -> None:
        pass

    named = under_name_of(build_model, lambda number: number + 1)
    assert (named.__name__, named(2)) == ("build_model", 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "microbatches is None: expected a list of those of the step"),
        (4, "microbatches is a int: expected a list of those of the step"),
        ([], "microbatches is empty: expected at least one"),
    ],
)
def test_what_is_no_list_of_microbatches_is_said(given: object, words: str) -> None:
    with pytest.raises(AdapterError, match=f"^{words}$"):
        TINY.list_microbatches(given)
    assert TINY.list_microbatches([1]) == [1]


@pytest.mark.parametrize(("given", "shown"), [("mse", "'mse'"), (None, "None"), (nn.MSELoss, "a type")])
def test_what_is_no_function_is_said(given: object, shown: str) -> None:
    with pytest.raises(AdapterError, match=f"^criterion is {shown}: expected a function of two$"):
        TINY.expect_function("criterion", given, "a function of two")
    TINY.expect_function("criterion", nn.MSELoss(), "a function of two")


@pytest.mark.sweep
def test_what_is_no_whitebox_is_said(whitebox: WhiteBox) -> None:
    for given, shown in (("x", "'x'"), (object(), "a object"), (WhiteBox, "a type")):
        with pytest.raises(
            AdapterError, match=f"^whitebox is {shown}: expected pytest's fixture of that name, or None$"
        ):
            TINY.judge(given)
    assert TINY.judge(None) is validate
    assert TINY.judge(whitebox) == whitebox.validate
