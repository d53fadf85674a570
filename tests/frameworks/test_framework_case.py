"""A case of a framework and its replay line, without the framework."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.own.case import CaseError
from pipeproof.pipeline.schedule import ScheduleError
from tests.frameworks.engines.deepspeed_layout import DeepSpeedLayout
from tests.frameworks.engines.framework_case import FRAMEWORKS, LAYOUTS, FrameworkCase
from tests.frameworks.engines.framework_draws import framework_cases
from tests.frameworks.engines.megatron_layout import MegatronLayout
from tests.frameworks.engines.torchtitan_layout import TorchtitanLayout

DRAWN = st.sampled_from(FRAMEWORKS).flatmap(framework_cases)


@given(DRAWN)
@settings(deadline=None, max_examples=60)
def test_a_case_is_its_replay_line(case: FrameworkCase) -> None:
    assert FrameworkCase.parse(str(case)) == case


def test_the_line_says_what_differs_from_the_defaults() -> None:
    megatron = FrameworkCase(
        MegatronLayout(pp=4, vp=2, layers=8, seed=7, tied=True, p2p_overlap=True, group=5, recompute="full"), 10
    )
    assert str(megatron) == "megatron r4 v2 m10 dp1 layers=8 tied p2p-overlap recompute=full group=5 seed=7"
    assert str(FrameworkCase(DeepSpeedLayout(dp=2, zero=1))) == "deepspeed r2 v1 m4 dp2 layers=4 zero=1 seed=0"
    titan = FrameworkCase(TorchtitanLayout(vp=2, schedule="ZBVZeroBubble"))
    assert str(titan) == "torchtitan r2 v2 m4 dp1 layers=4 schedule=ZBVZeroBubble seed=0"
    assert (titan.schedule, titan.stages, titan.processes, titan.bindings.count("V 2")) == ("zb-v", 4, 2, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("megatron", "is no case of a framework: expected one of megatron, deepspeed, torchtitan, then ranks"),
        ("megatron r2 m4 dp1", "is no case of a framework"),
        ("nanotron r2 v1 m4 dp1", "is no case of a framework"),
        ("megatron r2 v1 m4 dp1 colour=red", "'colour=red' is no option: known are layers, seed, tied"),
        ("megatron r2 v1 m4 dp1 tied=yes", "'tied=yes' is no option"),
        ("megatron r2 v1 m4 dp1 group", "'group' is no option"),
        ("megatron r2 v1 m4 dp1 layers=x", "'layers=x' is no option: did you mean 'layers'?"),
        ("megatron r2 v1 m4 dp1 tied tied", "tied is said twice"),
        ("megatron r2 v1 m4 dp1 layers=5", "5 layers are left for 2 stages: each has to have as many"),
        ("megatron r1 v2 m4 dp1", "Megatron has virtual stages on 2 ranks and more"),
        ("megatron r2 v2 m3 dp1", "the last group would have 1 microbatches: Megatron wants 0, or 2 and more"),
        ("megatron r2 v2 m1 dp1", "Megatron wants groups of 2 microbatches at least, and of all 1 at most: not 2"),
        ("megatron r2 v2 m2 dp1 layers=4 first=2 last=2", "first and last leave no rank between them"),
        ("megatron r2 v1 m4 dp1 group=3", "group=3 is for virtual stages"),
        ("megatron r2 v1 m4 dp1 per-token", "per-token wants a loss function of three results"),
        ("megatron r2 v1 m4 dp1 overlap", "overlap is for replicas"),
        ("megatron r2 v1 m4 dp1 recompute=some", "recompute is some: none, full or selective"),
        ("deepspeed r2 v2 m4 dp1", "DeepSpeed's PipelineEngine has one stage on a rank: give v1"),
        ("deepspeed r2 v1 m4 dp1 zero=3", "zero=3: DeepSpeed has pipelines with ZeRO 0 and 1"),
        ("deepspeed r4 v1 m4 dp1 layers=1", "3 layers cannot be cut into 4 stages"),
        ("deepspeed r2 v1 m4 dp1 partition=best", "partition=best: known are uniform, parameters, type:block"),
        ("torchtitan r1 v1 m4 dp1", "torchtitan has pipelines on 2 ranks and more"),
        ("torchtitan r2 v1 m1 dp1", "torch's 1F1B wants as many microbatches as stages, 2"),
        ("torchtitan r2 v1 m4 dp1 schedule=ZBVZeroBubble", "ZBVZeroBubble has 2 stages and more on a rank"),
        ("torchtitan r2 v1 m4 dp1 schedule=nope", "schedule=nope: known are 1F1B, GPipe"),
        ("torchtitan r2 v1 m4 dp1 reshard=never", "reshard is for shards"),
        ("torchtitan r2 v1 m4 dp2 replicate=0", "replicate=0 does not divide 2 replicas"),
    ],
)
def test_text_that_is_no_case_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(CaseError, match=words):
        FrameworkCase.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("megatron r0 v1 m4 dp1", "ranks is 0: expected at least 1"),
        ("megatron r2 v0 m4 dp1", "stages on a rank is 0: expected at least 1"),
        ("megatron r2 v1 m0 dp1", "microbatches is 0: expected at least 1"),
        ("megatron r2 v1 m4 dp0", "replicas is 0: expected at least 1"),
        ("megatron r2 v1 m4 dp999", "replicas is 999: expected at most 128"),
        ("megatron r2 v1 m4 dp1 layers=0", "layers is 0: expected at least 1"),
        ("megatron r2 v1 m4 dp1 group=99999", "group is 99999: expected at most 4096"),
        ("megatron r2 v1 m4 dp1 seed=99999999999", "seed is 99999999999: expected at most 4294967295"),
    ],
)
def test_numbers_out_of_bounds_are_refused(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        FrameworkCase.parse(text)


def test_every_option_is_offered_and_its_default_is_the_first() -> None:
    for layout in LAYOUTS.values():
        told = {one.name: one.default for one in layout.told().values()}
        assert {name: values[0] for name, values in layout.offered.items()} == told
