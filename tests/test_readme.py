"""README's examples: every command runs, and prints what README says it prints."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
Launch = Callable[..., "subprocess.CompletedProcess[str]"]

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
ITSELF = "ci/test"  # the one command that is not run here: it is what runs this


def examples() -> list[tuple[str, str]]:
    """Every command of README with the output that it shows; empty where it shows none."""
    found = []
    for language, text in BLOCKS:
        if language == "console":
            for part in text.split("$ ")[1:]:
                command, _, output = part.partition("\n")
                if command != ITSELF:
                    found.append((command, output.strip()))
    return found


def arguments(command: str) -> list[str]:
    """``command`` with this Python in place of installed scripts."""
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command)]
    start = {
        "pipeproof": ["-m", "validation"],
        "ci/validate": ["-m", "validation", "validate"],
        "torchrun": ["-m", "torch.distributed.run"],
    }
    return [*start[words[0]], *words[1:]]


def steady(text: str) -> str:
    """``text`` without what differs from run to run: times, rates, and the last digits of measured numbers."""
    text = re.sub(r"\d+\.\d (s|ms|cases/s)\b", r"# \1", text)
    text = re.sub(r"\d+\.\d%", "#%", text)
    text = re.sub(r"\d\.\de-\d\d", "#e-#", text)
    text = re.sub(r"\d+\.\d{3,}", "#.#", text)
    return re.sub(r"[ ]+", " ", text)


def relevant(output: str) -> str:
    """Standard output without torchrun's own warnings."""
    lines = (line for line in output.splitlines() if not re.match(r"[WE]\d{4} |\*{5}|Setting OMP_NUM_THREADS", line))
    return "\n".join(lines).strip()


@pytest.mark.one_rank
@pytest.mark.parametrize(("command", "output"), examples(), ids=[command for command, _ in examples()])
def test_a_command_prints_what_readme_shows(command: str, output: str, python: Launch) -> None:
    target = ROOT / "verdicts.json"
    try:
        done = python(ROOT, *arguments(command))
    finally:
        if "verdicts.json" in command:
            target.unlink(missing_ok=True)
    assert done.returncode == (1 if "specimen=" in command else 0), done.stdout
    if output:
        table = re.search(r"(?m)^rank +step", output) is not None
        shown, seen = steady(output), steady(relevant(done.stdout))
        if table:  # a profile: its shape, not its times
            shown, seen = re.sub(r"\d+", "#", shown), re.sub(r"\d+", "#", seen)
        assert seen == shown


def test_every_program_in_readme_is_an_example_that_runs() -> None:
    programs = [text for language, text in BLOCKS if language == "python"]
    files = {path: path.read_text() for path in (ROOT / "tests" / "examples").glob("*.py")}
    for program in programs:
        assert any(text.endswith(program) for text in files.values()), program[:200]
    assert len(programs) == 2


def test_the_scripts_that_readme_names_are_there_and_ci_runs_the_tests() -> None:
    for name in ("ci/setup", "ci/validate", "ci/test"):
        assert (ROOT / name).stat().st_mode & 0o111
        assert name in README
    assert "ci/test" in (ROOT / ".ci" / "run").read_text()


def test_the_comparison_can_fail() -> None:
    assert steady("loss 1.2345 in 3.1 s") == steady("loss 9.8765 in 0.2 s")
    assert steady("8 pass; 8 of 8") != steady("7 pass; 8 of 8")
    assert arguments('pipeproof replay "a b" -x') == ["-m", "validation", "replay", "a b", "-x"]
    assert sys.executable
