"""The stack that a verdict shows is the user's: neither torch's nor Python's nor ours."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from pipeproof.core.observe.stack import Stack, own_stack

HERE = __file__


def _inner(call: Callable[[], Stack]) -> Stack:
    return call()


def _compiled(file: str) -> Callable[[Callable[[], Stack]], Stack]:
    """``called(call)`` as it would be in ``file``."""
    found: dict[str, Callable[[Callable[[], Stack]], Stack]] = {}
    exec(compile("def called(call):\n    return call()\n", file, "exec"), found)
    return found["called"]


def test_the_innermost_line_comes_first() -> None:
    first, second, *_ = _inner(lambda: own_stack())
    assert (first.file, first.function) == (HERE, "<lambda>")
    assert first.text.startswith("first, second, *_")
    assert (second.function, second.text) == ("_inner", "return call()")
    assert str(second) == f"tests/validation/core/observe/test_stack.py:{second.number} _inner: return call()"


def test_torch_and_python_are_no_lines_of_the_user() -> None:
    through = tree_map(lambda one: partial(own_stack)(), [torch.zeros(1)])[0]
    assert [line.function for line in through[:2]] == ["<lambda>", "test_torch_and_python_are_no_lines_of_the_user"]


def test_of_installed_packages_the_innermost_line_stands_before_the_users_own() -> None:
    outer, inner = _compiled("/x/site-packages/trainer/loop.py"), _compiled("/x/site-packages/trainer/step.py")
    files = [line.file for line in outer(lambda: inner(own_stack))]
    assert files[:2] == ["/x/site-packages/trainer/step.py", HERE]
    assert "/x/site-packages/trainer/loop.py" not in files


def test_a_line_whose_source_is_not_there_has_a_number() -> None:
    line = _compiled("<input>")(own_stack)[0]
    assert str(line) == "<input>:2 called"


def test_a_file_that_was_changed_and_loaded_again_has_its_new_lines(tmp_path: Path) -> None:
    file, found = tmp_path / "cell.py", []
    texts = ["call()  # as it was", "call()  # as it is, and longer"]
    for text in texts:
        file.write_text(text)
        exec(compile(text, str(file), "exec"), {"call": lambda: found.append(own_stack()[1])})
    assert [line.text for line in found] == texts
