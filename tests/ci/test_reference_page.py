"""The guide to the public API says what the code says, and names all that is public."""

import ast
import importlib
import re
from operator import attrgetter

import pytest
from reference_page import PAGE, PARTS, Name, Node, found, listed, signature, with_names

import pipeproof
import pipeproof.whitebox
from tests.support.golden import golden
from tests.support.sources import OURS, ROOT


def node(text: str) -> Node:
    (one,) = ast.parse(text).body
    assert isinstance(one, Node)
    return one


NAMES = [one for names in PARTS.values() for one in names]


def test_the_page_that_is_kept_is_what_the_code_says() -> None:
    assert with_names(PAGE.read_text()) == PAGE.read_text(), "run ci/reference"


def test_every_public_name_is_on_it() -> None:
    listed = {(one.package, one.name) for one in NAMES}
    listed |= {
        ("pipeproof.errors", name)
        for name in re.findall(r"`(\w+)`", PAGE.read_text().partition("## What is raised")[2])
    }
    # What is in these modules is listed, not they.
    modules = ("colossalai", "deepspeed", "megatron", "nanotron", "torchtitan", "transformers", "errors", "whitebox")
    homes = {"pipeproof": pipeproof, "pipeproof.errors": pipeproof.errors, "pipeproof.whitebox": pipeproof.whitebox}
    assert listed >= {(home, name) for home, one in homes.items() for name in one.__all__ if name not in modules}
    assert len(pipeproof.__all__) <= 18


@pytest.mark.parametrize("one", NAMES, ids=lambda one: f"{one.package}.{one.name}")
def test_a_name_is_where_the_page_says(one: Name) -> None:
    there = attrgetter(one.name)(importlib.import_module(one.package))
    written = one.own or one.name
    assert written in {own.__name__ for own in getattr(there, "__mro__", (there,))}
    assert found(ast.parse((ROOT / one.file).read_text()).body, written).name == written
    for method in one.methods:
        assert hasattr(there, method)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("f", "def f(self, a: int, /, b: str='x', *, c: tuple[int, ...]=(1, 2)) -> None: ..."),
        ("C", "class C:\n  a: int\n  b: str = ''\n  def m(self): ..."),
        ("C", "class C:\n  x: int\n  def __init__(self, *, y: int=0): ..."),
        ("p", "@property\ndef p(self) -> int: ..."),
        ("g", f"def g({', '.join(f'argument_{number}: dict[str, int]' for number in range(5))}) -> None: ..."),
    ],
    ids=["arguments", "fields", "init", "property", "long"],
)
def test_signatures(name: str, code: str) -> None:
    golden(signature(node(code), name))


def test_arguments_that_a_docstring_explains_are_a_list() -> None:
    text = "What it does.\n\na: the first\nof two. b: None: there is none.\n\nRaises x: never."
    shown = "What it does.\n\n- `a`: the first of two.\n- `b`: None: there is none.\n\nRaises x: never."
    assert listed(text, ["a", "b"]) == shown


@pytest.mark.long
def test_what_is_raised_is_there() -> None:
    classes = {node.name for source in OURS for node in source.nodes if isinstance(node, ast.ClassDef)}
    table = PAGE.read_text().partition("## What is raised")[2]
    errors = {name for row in table.splitlines()[4:] for name in re.findall(r"`([A-Z]\w+)`", row.split("|")[1])}
    assert len(errors) >= 10
    assert errors - {"AssertionError", "ValueError"} <= classes
