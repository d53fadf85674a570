"""README's examples: every command runs, and prints what README says it prints."""

import os
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeproof.pipeline.schedules import FAMILIES
from tests.support.warm_start import Ended

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
Launch = Callable[..., Ended]

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


def sequences() -> list[list[tuple[str, str]]]:
    """README's commands with their outputs, each behind those that write what it reads."""
    found = examples()
    before = {
        command: [other for other in found if other[0] != command and written(other[0]) & set(command.split())]
        for command, _ in found
    }
    inner = {command for first in before.values() for command, _ in first}
    return [[*before[command], (command, output)] for command, output in found if command not in inner]


def arguments(command: str) -> list[str]:
    """``command`` with this Python in place of installed scripts."""
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command)]
    start = {
        "pipeproof": ["-m", "pipeproof"],
        "ci/validate": ["-m", "pipeproof", "validate"],
        "ci/gate": ["-m", "pipeproof", "gate"],
        "torchrun": ["-m", "torch.distributed.run"],
        "python": [],
    }
    return [*start[words[0]], *words[1:]]


def written(command: str) -> set[str]:
    """The files that ``command`` writes."""
    return set(re.findall(r"--(?:json|svg|png|trace|out|record|junit|summary) (\S+)", command))


def steady(text: str) -> list[str]:
    """The words of ``text``, with times and rates blanked, which differ from run to run."""
    text = re.sub(r"\d+\.\d (s|ms|cases/s)\b", r"# \1", text)
    # Which schedules a seed draws, and how often, differs between versions of Hypothesis.
    text = re.sub(rf"(?m)^(({'|'.join(FAMILIES)}) \d+(, |$))+$", "# how often each schedule", text)
    # How many of some bits agree in another order of additions, and how far off a wrong gradient is, processors decide.
    text = re.sub(r"\b(\d+) compared, (?!0 |\1 )\d+ bit for bit", r"\1 compared, # bit for bit", text)
    text = re.sub(r"(relative error) \d+(\.\d+)?\b(?!e)", r"\1 #", text)
    if re.search(r"(?m)^rank +(step|makespan)", text):  # the table of a profile: times and their shares
        text = re.sub(r"\d+\.\d%", "#%", text)
    return text.split()


def same(seen: str, shown: str) -> bool:
    """Whether two outputs say the same; measured numbers need only be close.

    Machines round differently, and the text that models learn from comes with Python and differs between versions.
    """
    ours, theirs = steady(seen), steady(shown)
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(one: str, other: str) -> bool:
    """Equal words; or errors (``5.9e-07``) up to a factor of 4, or numbers of 3 decimals and more up to a quarter."""
    if one == other:
        return True
    for number, most in ((r"(\d\.\de[-+]\d\d)", 4), (r"(\d+\.\d{3,})", 1.25)):
        pieces, others = re.split(number, one), re.split(number, other)
        if len(pieces) > 1 and pieces[::2] == others[::2]:
            pairs = zip(map(float, pieces[1::2]), map(float, others[1::2]), strict=True)
            return all(max(pair) <= most * min(pair) for pair in pairs)
    return False


def relevant(output: str) -> str:
    """Standard output without torchrun's own warnings, and with files as seen from where they are."""
    shown = output.replace(f"{ROOT}{os.sep}", "").splitlines()
    lines = (line for line in shown if not re.match(r"[WE]\d{4} |\*{5}|Setting OMP_NUM_THREADS", line))
    return "\n".join(lines).strip()


@pytest.fixture
def run(python: Launch, tmp_path: Path) -> Callable[[str], Ended]:
    """Run a command of README where the tests are, on as many machines as it is for: here they are all this one."""
    for name in ("tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)

    def launch(command: str) -> Ended:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            here = command.replace("29500", str(free.getsockname()[1]))
        with ThreadPoolExecutor() as machines:
            others = [
                machines.submit(python, tmp_path, *arguments(here.replace("--node-rank 0", f"--node-rank {rank}")))
                for rank in range(1, 2 if "--nnodes 2" in command else 1)
            ]
            first = python(tmp_path, *arguments(here))
        for other in others:
            assert other.result().returncode == first.returncode, other.result().stdout
        return first

    return launch


@pytest.mark.parametrize("commands", sequences(), ids=[commands[-1][0] for commands in sequences()])
def test_a_command_prints_what_readme_shows(commands: list[tuple[str, str]], run: Callable[[str], Ended]) -> None:
    for command, output in commands:
        if "--svg" in command or "--png" in command:
            pytest.importorskip("matplotlib")  # the extra "plot"
        done = run(command)
        fails = any(word in command for word in ("specimen=", "one_buffer", "not_reduced"))
        assert done.returncode == fails, done.stdout
        if output:
            seen = relevant(done.stdout)
            assert same(seen, output), f"now it prints:\n{seen}"
            losses = [float(loss) for loss in re.findall(r"(?m)^step.* loss (\S+)", seen)]
            assert losses[-1:] <= losses[:1], "training lowers the loss"


def test_every_program_in_readme_is_an_example_that_runs() -> None:
    programs = [text for language, text in BLOCKS if language == "python"]
    files = {path: path.read_text() for path in (ROOT / "tests" / "examples").glob("*.py")}
    for program in programs:
        assert any(text.endswith(program) for text in files.values()), program[:200]
    assert len(programs) == 6


def test_the_scripts_that_readme_names_are_there_and_ci_runs_the_tests() -> None:
    for name in ("ci/setup", "ci/validate", "ci/test", "ci/gate"):
        assert (ROOT / name).stat().st_mode & 0o111
        assert name in README
    assert "ci/test" in (ROOT / ".ci" / "run").read_text()


def test_the_comparison_can_fail() -> None:
    assert same("loss 1.2345 in 3.1 s", "loss 1.2344 in 0.2 s")
    assert not same("loss 1.2345", "loss 9.8765")
    assert same("worst 1.4e-07", "worst 2.2e-07")
    assert not same("worst 1.4e-07", "worst 1.4e-03")
    assert not same("8 pass; 8 of 8", "7 pass; 8 of 8")
    assert not same("8 pass", "8 pass more")
    assert same("20 pass\n1f1b 6, zb-v 14", "20 pass\ngpipe 20")
    assert not same("20 pass\n1f1b 6, zb-v 14", "20 pass")
    assert same("rank step\n0 3.1 ms 20.0%", "rank step\n0 4.1 ms 29.1%")
    assert not same("bubble 20.0%", "bubble 29.1%")


def test_every_command_is_run_and_has_what_it_reads() -> None:
    run = [[command.split()[:2] for command, _ in commands] for commands in sequences()]
    assert [["pipeproof", "record"], ["pipeproof", "replay"], ["pipeproof", "diff"]] in run
    assert {command for commands in sequences() for command, _ in commands} == {command for command, _ in examples()}


def test_a_command_as_words() -> None:
    assert written("a --json b.json --svg c.svg d") == {"b.json", "c.svg"}
    assert arguments('pipeproof replay "a b" -x') == ["-m", "pipeproof", "replay", "a b", "-x"]
