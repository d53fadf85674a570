"""torch's own pipelines under our plans: right ones pass, and what is known to be wrong in torch is observed to be."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case, CaseError
from pipeproof.own.findings import FINDINGS, Finding, is_known
from pipeproof.own.fuzz import Tally, cases, fuzz
from pipeproof.own.judgement import judge
from pipeproof.own.observe import as_one
from pipeproof.own.runtimes import TORCH, TORCH_CLASSES
from pipeproof.own.torch_runtime import TorchRank, observe_torch
from pipeproof.own.validator import validate
from pipeproof.pipeline.transports import Transport
from pipeproof.whitebox import torch_pipelining
from pipeproof.worlds.rank_report import Ending, RankFailed, RankReport
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sweeps import SWEEP

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
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise")  # torch divides by M, here a power of two


@pytest.mark.parametrize("schedule", ["naive", "zb-h2", "v-half", "1f1b"])
def test_a_schedule_of_ones_own_runs_on_torchs_runtime(schedule: str, world: World) -> None:
    virtual = 2 if schedule == "v-half" else 1
    line = f"{schedule} r2 s{2 * virtual} m3 split={SPLIT[virtual]} model=dropout loss=tokens plan=accumulate+train"
    verdict = validate(sound(f"{line} options=unscaled runtime=torch-csv", world), world)
    assert verdict.outcome == "pass"
    gradient = verdict.law("gradient")
    assert gradient.exact == gradient.checked > 0  # losses are only as exact as they survive a division by the tokens


ON_A_TRANSPORT = "deferred-receives-wait"  # where messages of two ranks run one at a time, which those of gloo do not


@pytest.mark.parametrize("transport", [Transport.PAIR, Transport.UNLIMITED])
def test_a_finding_of_a_transport_is_there_on_that(transport: Transport, simulated: World) -> None:
    simulated.transport = transport
    (finding,) = (one for one in FINDINGS if one.name == ON_A_TRANSPORT)
    assert finding.verdict(simulated) == ("raised" if transport is Transport.PAIR else "pass")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_a_finding_is_there_or_torch_has_mended_it(finding: object, world: World) -> None:
    """The judgement fails on real faults. If one passes here, say so in FINDINGS.md: this torch has mended it."""
    old = {"no-deferred-receives", "messages-to-oneself", "integers-between-stages"}  # 2.13 has none of them
    mended = {ON_A_TRANSPORT, "trial-run-trains-buffers", *old}  # the second of them by 2.15
    assert finding.verdict(world) in ({"fail", "raised", "pass"} if finding.name in mended else {"fail", "raised"})  # type: ignore[attr-defined]


@pytest.mark.sweep
def test_zeros_where_one_device_has_no_gradient_are_told(world: World) -> None:
    line = "looped-bfs r1 s2 m1 split=1,1 model=sometimes plan=train seed=1 options=unscaled runtime=torch"
    verdict = validate(Case.parse(line), world)
    assert verdict.outcome == "pass"
    golden(verdict.law("presence").note)


def test_a_finding_shows_in_its_own_line_and_not_in_a_plain_case() -> None:
    plain = Case.parse("zb-h1 r2 s4 m4 split=1,1,1,1 model=mlp options=unscaled plan=train runtime=torch")
    assert not is_known(plain, FINDINGS)
    for finding in FINDINGS:
        if not finding.csv:
            assert finding.shows(Case.parse(finding.line)), finding.name


@pytest.mark.sweep
def test_a_short_campaign_on_torch_finds_nothing_new(world: World) -> None:
    drawn = cases(runtime=TORCH, max_ranks=2).filter(lambda case: not is_known(case, FINDINGS))
    tally = Tally(6)
    found = fuzz(world, tally, seed_=5, strategy=drawn)
    assert found is None, found
    assert tally.cases == 6


@pytest.mark.sweep
@pytest.mark.parametrize(
    "line",
    [
        "1f1b r2 s2 m3 split=1,2 model=mlp loss=tokens plan=accumulate+train options=unscaled replicas=2",
        "interleaved r1 s2 m2 split=1,1 model=gpt plan=train replicas=2",
    ],
)
def test_replicas_in_ddp_give_what_a_single_device_gives(line: str, world: World) -> None:
    verdict = validate(sound(f"{line} runtime=torch", world), world)
    assert verdict.outcome == "pass", verdict
    replicas = verdict.law("replicas")
    assert replicas.exact == replicas.checked > 0


def never_synced(rank: TorchRank) -> None:
    """No backward is taken for the last, so that all run in ``no_sync``."""
    for stage in torch_pipelining.stages_of(rank.schedule):
        inner = stage.backward_maybe_with_nosync
        stage.backward_maybe_with_nosync = functools.partial(_without_last, inner)


def _without_last(inner: Callable[..., Any], kind: str, given: Any, last_backward: bool = False) -> Any:
    return inner(kind, given, last_backward=False)


def divided_twice(rank: TorchRank) -> None:
    """What is reduced is a mean already, and is divided by the number of replicas once more."""
    for module in rank.wrapped.values():
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(module.process_group, _mean_of_mean)


def _mean_of_mean(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.allreduce_hook(group, bucket).then(lambda done: done.value() / group.size())


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("plant", "laws"),
    [
        pytest.param(never_synced, {"gradient", "replicas"}, marks=SWEEP),
        (divided_twice, {"gradient"}),
    ],
)
def test_a_fault_of_ddp_is_caught_in_a_campaign_and_shrunk(
    plant: Callable[[TorchRank], None], laws: set[str], world: World
) -> None:
    def run(case: Case, world: World) -> Verdict:
        rows = world.run(functools.partial(observe_torch, plant=plant), case, ranks=case.processes)
        return judge(case, as_one(case, rows))

    drawn = cases(runtime=TORCH, schedules=("gpipe",), models=("mlp",), max_ranks=2)
    strategy = drawn.filter(lambda case: not is_known(case, FINDINGS))
    found = fuzz(world, Tally(40), seed_=1, strategy=strategy, run=run)
    assert found.verdict is not None, found.failure
    assert {law.name for law in found.verdict.laws if law.outcome == "fail"} >= laws
    # With a single microbatch the trial run's announcement stands for what is left out of the first step.
    case = replace(found.case, options=(), plan=("train",))
    smallest = "gpipe r1 s1 m1 split=1 model=mlp plan=train seed=0 runtime=torch replicas=2"
    assert str(case) == smallest


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("naive r2 s2 m2 runtime=torch", "no class for naive: use torch-csv"),
        ("1f1b r2 s2 m1 runtime=torch", "as many microbatches as stages, 2"),
        ("interleaved r2 s4 m5 runtime=torch", "2 rounds to be of one length"),
        ("1f1b r2 s2 m2 ragged runtime=torch", "microbatches of one size"),
        ("1f1b r2 s2 m2 model=gpt-tied runtime=torch", "their copies must be on one rank"),
        ("1f1b r2 s2 m2 specimen=stage-negated runtime=torch", "planted in pipeproof's own runtime"),
        ("1f1b r2 s2 m2 options=unscaled", "options=unscaled are for torch: expected runtime=torch"),
        ("1f1b r2 s2 m2 options=nonsense runtime=torch", "unknown option 'nonsense'"),
        ("1f1b r2 s2 m2 replicas=2", "replicas=2 are for torch: expected runtime=torch or torch-csv"),
        ("1f1b r2 s2 m2 model=batchnorm replicas=2 runtime=torch", "the running statistics of the first"),
        ("1f1b r2 s2 m2 replicas=two runtime=torch", "'replicas=two': expected a whole number behind the ="),
        ("1f1b r2 s2 m2 runtime=jax", "unknown runtime 'jax'"),
    ],
)
def test_what_torch_cannot_run_is_a_sentence(line: str, why: str) -> None:
    with pytest.raises(CaseError, match=why):
        Case.parse(line)


def test_a_finding_that_shows_in_most_runs_is_tried_until_it_does() -> None:
    finding = Finding("now and then", FINDINGS[0].line, lambda case: True, tries=2)
    for outcomes, expected in ((["pass", "fail"], "fail"), (["fail"], "fail"), (["pass", "pass"], "pass")):
        verdicts = [Verdict("", outcome, "none", ()) for outcome in outcomes]  # type: ignore[arg-type]
        with mock.patch("pipeproof.own.findings.judge_case", side_effect=verdicts) as judged:
            assert finding.verdict(object()) == expected  # type: ignore[arg-type]
        assert judged.call_count == len(outcomes)
    with mock.patch("pipeproof.own.findings.judge_case", side_effect=RankFailed([RankReport(0, Ending.DIED, "")])):
        assert finding.verdict(object()) == "raised"  # type: ignore[arg-type]
