"""The workflow that ``init github`` writes: it parses, its commands exist with these options, its gates run."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from pipeproof.commands import cli
from pipeproof.commands.init import text
from pipeproof.commands.option_parser import UsageError
from tests.support.golden import golden
from tests.support.warm_start import Ended

Launch = Callable[..., Ended]
WORKFLOW = yaml.safe_load(text("github"))
JOBS: dict[str, Any] = WORKFLOW["jobs"]
# What makes a gate small enough for a test; of an option that is given twice the last counts.
SMALL = "--schedule 1f1b --ranks 2 --microbatches 2 --layers 2 --model mlp --cases 0 --device cpu".split()


def commands(*jobs: str) -> Iterator[list[str]]:
    """Every command of these jobs, as words, with what GitHub puts in."""
    for job in jobs or JOBS:
        for step in JOBS[job]["steps"]:
            said = step.get("run", "").replace("${{ github.run_number }}", "1234")
            said = said.partition("  # CHANGE")[0].replace("${{ vars.PIPEPROOF_SCHEDULES }}", "1f1b,zb-v")
            for line in said.replace("$GITHUB_STEP_SUMMARY", "summary.md").splitlines():
                yield line.split()


def module(words: list[str]) -> tuple[str, list[str]]:
    """The module that a command runs, and its arguments."""
    if words[0] == "pipeproof":
        return "pipeproof", words[1:]
    starts = {"python": ["-m"], "torchrun": ["--nproc-per-node", "4", "-m"]}[words[0]]
    assert words[1 : 1 + len(starts)] == starts
    return words[1 + len(starts)], words[2 + len(starts) :]


def test_every_command_exists_and_takes_its_options() -> None:
    found = [module(words) for words in commands()]
    assert [name for name, _ in found].count("pipeproof") == 3
    for name, arguments in found:
        assert importlib.util.find_spec(name) is not None
        if name == "pipeproof":
            options = cli._parser().parse_args(arguments)
            assert options.html == "reports/gate.html"
            assert {options.junit, options.summary, options.artifacts} == {"reports/gate.xml", "summary.md", "reports"}
            assert options.annotations == "github"


def test_an_option_that_is_not_there_would_be_seen() -> None:
    with pytest.raises(UsageError, match="--no-such-option"):
        cli._parser().parse_args(["gate", "--no-such-option"])


def test_what_runs_when() -> None:
    assert set(JOBS) == {"cpu", "gpu", "nightly"}
    triggers = WORKFLOW[True]  # YAML 1.1 reads "on" as a truth
    assert set(triggers) == {"push", "pull_request", "schedule"}
    assert JOBS["cpu"]["if"] == "github.event_name != 'schedule'"
    assert "vars.GPU_RUNNER != ''" in JOBS["gpu"]["if"]
    assert re.search(r"--seed 1234\b", " ".join(" ".join(words) for words in commands("nightly")))
    for job in JOBS.values():
        upload = job["steps"][-1]
        assert upload["if"] == "always()"
        assert upload["with"]["path"] == "reports"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("job", ["cpu", "gpu"])
def test_a_gate_runs_and_one_rank_reports(job: str, tmp_path: Path, python: Launch, torchrun: Launch) -> None:
    name, options = next(module(words) for words in commands(job) if "gate" in words)
    arguments = ["-m", name, *options, *SMALL]
    done = python(tmp_path, *arguments) if job == "cpu" else torchrun(tmp_path, *arguments, ranks=2)
    assert done.returncode == 0, done.stdout
    golden(done.stdout, lines="^gate ")
    suite = ElementTree.parse(tmp_path / "reports" / "gate.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "0", "0")
    golden((tmp_path / "summary.md").read_text(), lines="^###")
