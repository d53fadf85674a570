"""The guides to frameworks: their programs run and print what they show, and their tables show planted faults."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeproof.commands import init
from tests.support.guides import PAGES, blocks

PAGE = "validation/guides/{}.md"
PACKAGES = {
    "megatron": "megatron.core",
    "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
    "nanotron": "nanotron",
    "transformers": "transformers",
    "colossalai": "colossalai",
}
# How a guide's programs are run, by how their files begin, in the order in which it shows what they print.
COMMANDS = (["check_"], ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train_"])

FILES = ("test_right.py", "test_wrong.py")
WRONG = {  # what to put in place of what, in what init writes
    "megatron": ("forward_step, microbatches, model,", "forward_step, microbatches[::-1], model,"),
    "deepspeed": ("num_stages=RANKS, loss_fn=loss_fn", "num_stages=RANKS, loss_fn=lambda *given: 2 * loss_fn(*given)"),
    "torchtitan": ("(labels != IGNORE_INDEX).sum()", "2 * (labels != IGNORE_INDEX).sum()"),
    "nanotron": ("data_iterator, count, None)", "data_iterator, count // 2, None)"),
    "colossalai": ("iterator, boosted, criterion,", "iterator, boosted, lambda *x: 2 * criterion(*x),"),
    "transformers": ("loss_fn=loss_fn, scale_grads=False)", "loss_fn=loss_fn)"),
}


@pytest.fixture(params=PACKAGES)
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(PACKAGES[name], reason=f"{name} is not installed: ci/frameworks installs it")
    return name


def test_its_programs_run_and_print_what_it_shows(framework: str, tmp_path: Path) -> None:
    page = PAGE.format(framework)
    programs = [block for block in blocks("py") if block.page == page]
    for block in programs:
        (tmp_path / block.file).write_text(block.text)
    (tmp_path / f"my_{framework}.py").write_text(init.text(framework))
    shown = [block.text for block in blocks("text") if block.page == page]
    assert len(shown) == len(programs) == len(COMMANDS)
    for command, text in zip(COMMANDS, shown, strict=False):
        (program,) = [block.file for block in programs if block.file.startswith(command[-1])]
        line = [sys.executable, "-W", "ignore", *command[:-1], program]
        ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert text.strip() in ended.stdout.splitlines(), ended.stdout + ended.stderr
        assert ended.returncode == 0, ended.stderr


def test_its_table_says_of_faults_what_their_verdicts_say(framework: str) -> None:
    faults = importlib.import_module(f"tests.frameworks.{framework}_faults").FAULTS
    text = PAGES[PAGE.format(framework)]
    head, *shown = re.findall(r"(?m)^\| ([\w-]+)[^|]* \| ([\w-]+) \| ([^|]+) \|$", text)
    assert head == ("fault", "named", "where")
    said = {name: (name, one.kind, "; ".join(dict.fromkeys(one.places))) for name, one in faults.items()}
    assert shown == [said[name] for name, *_ in shown]
    assert len(shown) >= 5
    assert f"plants {len(faults)} faults" in text


def test_what_init_writes_passes_as_it_is_and_is_red_where_the_step_is_wrong(framework: str, tmp_path: Path) -> None:
    right, (place, wrong) = init.text(framework), WRONG[framework]
    assert right.count(place) == 1
    for name, content in (("right", right), ("wrong", right.replace(place, wrong))):
        (tmp_path / f"test_{name}.py").write_text(content)
    line = [sys.executable, "-m", "pytest", "-W", "ignore", "-rA", "-p", "no:cacheprovider", *FILES]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1, ended.stdout
    assert "PASSED test_right.py::test_my_pipeline" in ended.stdout, ended.stdout
    assert "FAILED test_wrong.py::test_my_pipeline" in ended.stdout, ended.stdout
    assert "shown by  " in ended.stdout, ended.stdout
