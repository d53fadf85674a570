"""Engines of frameworks fuzzed: what is drawn is covered, and a planted fault is caught and shrunk to its smallest.

``ci/frameworks`` runs this where frameworks are installed; elsewhere it is skipped. CASES and SEED make a campaign
longer, or another one; LINE is a case to run again.
"""

import os
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import pytest

from pipeproof import SimulatedWorld, World
from pipeproof.core.verdict import Verdict
from pipeproof.own.fuzz import Tally, fuzz
from tests.frameworks.engines.framework_case import FRAMEWORKS, FrameworkCase
from tests.frameworks.engines.framework_draws import framework_cases
from tests.frameworks.engines.framework_findings import FRAMEWORK_FINDINGS, FrameworkFinding, known
from tests.frameworks.engines.judge import judged

pytestmark = pytest.mark.pipeproof_ranks
# A fault that every microbatch's gradient shows, and the least that is right without it: one microbatch is not divided.
SMALLEST = {
    "megatron": ("not-divided", "megatron r1 v1 m2 dp1 layers=1 seed=0"),
    "deepspeed": ("not-divided", "deepspeed r1 v1 m2 dp1 layers=1 seed=0"),
    "torchtitan": ("not-divided", "torchtitan r2 v1 m1 dp1 layers=1 schedule=GPipe seed=0"),
}
CASES, SEED = int(os.environ.get("CASES", "8")), int(os.environ.get("SEED", "5"))
LINES = [os.environ["LINE"]] if "LINE" in os.environ else [line for _, line in SMALLEST.values()]
FINDINGS = [(framework, one) for framework in FRAMEWORKS for one in FRAMEWORK_FINDINGS[framework]]


def needs(framework: str) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: ci/frameworks installs it")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_short_campaign_passes(framework: str, world: World) -> None:
    needs(framework)
    drawn = framework_cases(framework).filter(lambda case: not known(case, FRAMEWORK_FINDINGS[framework]))
    tally = Tally(CASES)
    found = fuzz(world, tally, seed_=SEED, strategy=drawn, run=judged)
    assert found is None, str(found.verdict)
    assert not tally.undecided, [str(one.case) for one in tally.undecided]
    assert tally.counts["verdicts"]["pass"] == CASES


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_planted_fault_is_found_and_shrunk_to_its_smallest_case(framework: str, world: World) -> None:
    needs(framework)
    fault, smallest = SMALLEST[framework]
    faults = import_module(f"tests.frameworks.{framework}_faults")
    drawn = framework_cases(framework, max_ranks=2).filter(lambda case: not known(case, FRAMEWORK_FINDINGS[framework]))

    def run(case: FrameworkCase, world: World) -> Verdict:
        return judged(case, world, own_step=partial(faults.step, fault))

    found = fuzz(world, Tally(20), strategy=drawn, run=run)
    assert found is not None
    assert str(found.case) == smallest
    assert found.verdict is not None
    assert found.verdict.outcome == "fail"
    assert found.verdict.replay == f"LINE='{smallest}' ci/frameworks -k a_line_passes"


@pytest.mark.parametrize(("framework", "finding"), FINDINGS, ids=[one.name for _, one in FINDINGS])
def test_a_finding_is_there(framework: str, finding: FrameworkFinding, world: World) -> None:
    """If one passes here, say so in FINDINGS.md: this version has mended it."""
    needs(framework)
    case = FrameworkCase.parse(finding.line)
    if not finding.by_luck:
        assert judged(case, world).outcome != "pass"
        return
    with SimulatedWorld(silent=True) as simulated:  # real ranks show it by luck: who gets what was freed?
        assert [one.kind for one in judged(case, simulated).causes] == ["freed-in-flight"]


@pytest.mark.parametrize("line", LINES)
def test_a_line_passes(line: str, world: World) -> None:
    case = FrameworkCase.parse(line)
    needs(case.framework)
    verdict = judged(case, world)
    assert verdict.outcome == "pass", str(verdict)
