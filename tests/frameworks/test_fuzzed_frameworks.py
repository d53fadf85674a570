"""Frameworks fuzzed by themselves: what is drawn is covered, and a planted fault is caught and shrunk to its smallest.

``ci/frameworks`` runs this where frameworks are installed; elsewhere it is skipped.
"""

from functools import partial
from importlib import import_module
from importlib.util import find_spec

import pytest

from pipeproof import World
from pipeproof.cases.any_case import case_of_line
from pipeproof.cases.findings import Finding, known
from pipeproof.cases.frameworks.engines import judged
from pipeproof.cases.frameworks.framework_case import FRAMEWORKS, FrameworkCase
from pipeproof.cases.frameworks.framework_draws import framework_cases
from pipeproof.cases.frameworks.framework_findings import FRAMEWORK_FINDINGS
from pipeproof.cases.fuzz import Tally, fuzz
from pipeproof.commands.cli import main
from pipeproof.judging.verdict import Verdict

pytestmark = pytest.mark.pipeproof_ranks
# A fault that every microbatch's gradient shows, and the least that is right without it: one microbatch is not divided.
SMALLEST = {
    "megatron": ("not-divided", "megatron r1 v1 m2 dp1 layers=1 seed=0"),
    "deepspeed": ("not-divided", "deepspeed r1 v1 m2 dp1 layers=1 seed=0"),
    "torchtitan": ("not-divided", "torchtitan r2 v1 m1 dp1 layers=1 schedule=GPipe seed=0"),
}
FINDINGS = [(framework, one) for framework in FRAMEWORKS for one in FRAMEWORK_FINDINGS[framework]]


def needs(framework: str) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: ci/frameworks installs it")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_short_campaign_passes(framework: str, world: World) -> None:
    needs(framework)
    drawn = framework_cases(framework).filter(lambda case: not known(case, FRAMEWORK_FINDINGS[framework]))
    tally = Tally[FrameworkCase](8)
    found = fuzz(world, tally, seed_=5, strategy=drawn)
    assert found is None, str(found.verdict)
    assert not tally.undecided, [str(one.case) for one in tally.undecided]
    assert tally.verdicts["pass"] == 8


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_planted_fault_is_found_and_shrunk_to_its_smallest_case(framework: str, world: World) -> None:
    needs(framework)
    fault, smallest = SMALLEST[framework]
    faults = import_module(f"tests.frameworks.{framework}_faults")
    drawn = framework_cases(framework, max_ranks=2).filter(lambda case: not known(case, FRAMEWORK_FINDINGS[framework]))

    def run(case: FrameworkCase, world: World) -> Verdict:
        return judged(case, world, own_step=partial(faults.step, fault))

    found = fuzz(world, Tally[FrameworkCase](20), strategy=drawn, run=run)
    assert found is not None
    assert str(found.case) == smallest
    assert found.verdict is not None
    assert found.verdict.verdict == "fail"
    assert found.verdict.replay == f'pipeproof replay "{smallest}"'


@pytest.mark.parametrize(("framework", "finding"), FINDINGS, ids=[one.name for _, one in FINDINGS])
def test_a_finding_is_there(framework: str, finding: Finding[FrameworkCase], world: World) -> None:
    """If one passes here, say so in FINDINGS.md: this version has mended it."""
    needs(framework)
    case = case_of_line(finding.line)
    assert isinstance(case, FrameworkCase)
    if finding.tries == 1:
        assert finding.verdict(world) != "pass"
        return
    with World(kind="simulated", silent=True) as simulated:  # real ranks show it by luck: who gets what was freed?
        assert [one.kind for one in judged(case, simulated).cause] == ["freed-in-flight"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_line_is_replayed(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    needs(framework)
    line = SMALLEST[framework][1]
    assert main(["replay", *line.split()]) == 0
    assert "1 pass" in capsys.readouterr().out
