"""torch's own pipelines under our plans: right ones pass, and what is known to be wrong in torch is seen to be."""

import pytest
import torch

from validation.case import Case, CaseError
from validation.findings import FINDINGS, known
from validation.fuzz import cases, fuzz
from validation.runtimes import TORCH, TORCH_CLASSES
from validation.validator import validate
from validation.world import World

SPLIT = {1: "1,2", 2: "1,2,1,1"}
VIRTUAL = {"gpipe": 1, "1f1b": 1}


def sound(line: str, world: World) -> Case:
    """The case of ``line``; skips where a finding that is there on this torch shows in it."""
    case = Case.parse(line)
    there = [finding.name for finding in FINDINGS if finding.shows(case) and finding.verdict(world) != "pass"]
    if there:
        pytest.skip(f"torch {torch.__version__} has {', '.join(there)}")
    return case


@pytest.mark.parametrize("schedule", TORCH_CLASSES)
def test_every_class_gives_what_the_reference_gives(schedule: str, world: World) -> None:
    virtual = VIRTUAL.get(schedule, 2)
    line = f"{schedule} r2 s{2 * virtual} m4 split={SPLIT[virtual]} model=pair plan=train+train runtime=torch"
    verdict = validate(sound(line, world), world)
    assert (verdict.verdict, verdict.tier) == ("pass", "bitwise")  # torch divides by M, here a power of two


@pytest.mark.parametrize("schedule", ["naive", "zb-h2", "v-half", "1f1b"])
def test_a_schedule_of_ones_own_runs_on_torchs_runtime(schedule: str, world: World) -> None:
    virtual = 2 if schedule == "v-half" else 1
    line = f"{schedule} r2 s{2 * virtual} m3 split={SPLIT[virtual]} model=dropout loss=tokens plan=accumulate+train"
    verdict = validate(sound(f"{line} options=unscaled runtime=torch-csv", world), world)
    assert verdict.verdict == "pass"
    gradient = verdict.law("gradient")
    assert gradient.exact == gradient.checked > 0  # losses are only as exact as they survive a division by the tokens


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_a_finding_is_there_or_torch_has_mended_it(finding: object, world: World) -> None:
    """The judgement fails on real faults. If one passes here, say so in FINDINGS.md: this torch has mended it."""
    old = {"no-deferred-receives", "messages-to-oneself", "integers-between-stages"}  # 2.13 has none of them
    mended = {"trial-run-trains-buffers", *old}  # the first of them by 2.15
    assert finding.verdict(world) in ({"fail", "raised", "pass"} if finding.name in mended else {"fail", "raised"})  # type: ignore[attr-defined]


def test_a_finding_shows_in_its_own_line_and_not_in_a_plain_case() -> None:
    plain = Case.parse("zb-h1 r2 s4 m4 split=1,1,1,1 model=mlp options=unscaled plan=train runtime=torch")
    assert not known(plain, FINDINGS)
    for finding in FINDINGS:
        if not finding.csv:
            assert finding.shows(Case.parse(finding.line)), finding.name


def test_a_short_campaign_on_torch_finds_nothing_new(world: World) -> None:
    drawn = cases(runtime=TORCH, max_ranks=2).filter(lambda case: not known(case, FINDINGS))
    tally, found = fuzz(world, budget=6, seed_=5, strategy=drawn)
    assert found is None, found
    assert tally.cases == 6


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("naive r2 s2 m2 runtime=torch", "no class for naive: use torch-csv"),
        ("1f1b r2 s2 m1 runtime=torch", "as many microbatches as stages, 2"),
        ("interleaved r2 s4 m5 runtime=torch", "2 rounds to be of one length"),
        ("1f1b r2 s2 m2 ragged runtime=torch", "microbatches of one size"),
        ("1f1b r2 s2 m2 model=gpt-tied runtime=torch", "their copies must be on one rank"),
        ("1f1b r2 s2 m2 specimen=stage-negated runtime=torch", "planted in pipeproof's own runtime"),
        ("1f1b r2 s2 m2 options=unscaled", "are torch's"),
        ("1f1b r2 s2 m2 options=nonsense runtime=torch", "unknown option 'nonsense'"),
        ("1f1b r2 s2 m2 runtime=jax", "unknown runtime 'jax'"),
    ],
)
def test_what_torch_cannot_run_is_a_sentence(line: str, why: str) -> None:
    with pytest.raises(CaseError, match=why):
        Case.parse(line)
