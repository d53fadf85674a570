"""Whole runtimes in the simulated world: verdicts as on real ranks, races by name, and never one in right code."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pipeproof import whitebox
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.own.runtimes import TORCH_CLASSES
from pipeproof.own.validator import validate
from pipeproof.pipeline.schedules import FAMILIES, virtuals
from pipeproof.pipeline.transports import Transport
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.primitives.stacked import validate_stack
from pipeproof.wings.primitives.stacks import Stack, smallest_stack
from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.worlds.world import World
from tests.examples.my_pipeline import OneFOneB
from tests.examples.torch_pipelining import train
from tests.support.racy_1f1b import HANGS, ONE_BUFFER, RACES, READS_EARLY, WAITS, trained
from tests.support.steps import blocks, loss_fn, pairs
from tests.support.sweeps import sampled, some

pytestmark = pytest.mark.long

RANKS = 3


def judged(world: World, step: Any) -> Verdict:
    build = partial(blocks, RANKS)
    return WhiteBox(world).validate(step, reference=build, microbatches=pairs(), ranks=RANKS, loss_fn=loss_fn)


def by_hand(runtime: type[OneFOneB]) -> Any:
    return partial(trained, by=runtime)


def by_torch(model: Any, microbatches: list[Any]) -> Any:
    import torch.distributed as dist

    from pipeproof import watch

    stage = watch(model[dist.get_rank()])
    return stage, train(stage, microbatches, loss_fn)


def small(name: str) -> Case:
    count = 2 * virtuals(name, looped=2)
    return Case.parse(f"{name} r2 s{count} m4 split={','.join('1' * count)} model=mlp")


@pytest.mark.parametrize("name", sampled(FAMILIES, 3))
def test_our_schedules_are_right_to_the_bit_with_tags_and_in_order(name: str, simulated: World) -> None:
    for simulated.seed, simulated.transport in enumerate((Transport.UNLIMITED, Transport.PAIR)):
        verdict = validate(small(name), simulated)
        assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)


@pytest.mark.parametrize("name", TORCH_CLASSES)
def test_torchs_schedules_are_right_with_tags_and_in_order_in_every_interleaving(name: str, simulated: World) -> None:
    case = replace(small(name), runtime="torch", options=("unscaled",), plan=("train",))
    for simulated.transport in (Transport.UNLIMITED, Transport.PAIR):
        simulated.most = 5
        for _ in simulated.interleavings():
            verdict = validate(case, simulated)
            assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)
    assert [(one.found, one.complete) for one in simulated.explorations] == [(1, True)] * 2


def test_replicas_of_torchs_pipelines_have_groups_of_their_own(simulated: World) -> None:
    line = "gpipe r2 s2 m2 split=1,1 model=mlp plan=train options=unscaled replicas=2 runtime=torch"
    verdict = validate(Case.parse(line), simulated)
    assert (verdict.outcome, verdict.law("replicas").outcome) == ("pass", "pass"), str(verdict)


@pytest.mark.parametrize("primitive", some(["tp", "zero-3", "ep"], left=["tp"]))
def test_a_primitive_is_right_on_simulated_ranks(primitive: str, simulated: World) -> None:
    for simulated.transport in (Transport.UNLIMITED, Transport.PAIR):
        verdict = validate_stack(Stack.parse(smallest_stack(primitive)), WhiteBox(simulated))
        assert verdict.outcome == "pass", str(verdict)


@pytest.mark.parametrize("step", [by_hand(OneFOneB), by_torch], ids=["by_hand", "by_torch"])
def test_a_foreign_step_has_the_verdict_that_it_has_on_real_ranks(step: Any, simulated: World, world: World) -> None:
    real = judged(world, step)
    assert (real.outcome, real.tier) == ("pass", "bitwise"), str(real)
    for simulated.seed in range(3):
        verdict = judged(simulated, step)
        assert replace(verdict, rerun=real.rerun) == real, str(verdict)


@pytest.mark.sweep
def test_a_wrong_answer_is_the_same_wrong_answer(simulated: World, world: World) -> None:
    here, there = (judged(one, by_hand(ONE_BUFFER)) for one in (simulated, world))
    assert here.outcome == "fail", str(here)
    assert (here.mismatches, here.causes) == (there.mismatches, there.causes)


@pytest.mark.parametrize("runtime", RACES, ids=lambda runtime: runtime.__name__)
def test_a_race_is_named_under_some_seed(runtime: type[OneFOneB], simulated: World) -> None:
    for simulated.seed in range(20):
        verdict = judged(simulated, by_hand(runtime))
        if verdict.causes:
            break
    (cause,) = verdict.causes
    assert (verdict.outcome, verdict.exit_status, cause.kind) == ("fail", 1, RACES[runtime]), str(verdict)
    assert cause.lines, "the user's own lines are told"
    assert all(one.line.file.endswith(("racy_1f1b.py", "my_pipeline.py")) for one in cause.lines)


def test_a_deadlock_is_told_with_the_lines(simulated: World) -> None:
    verdict = judged(simulated, by_hand(HANGS))
    assert (verdict.outcome, verdict.ended) == ("unknown", "hang"), str(verdict)
    assert "racy_1f1b" in re.findall(r"can never go on at (\w+)\.py:", verdict.failure)


def test_right_code_has_no_race_under_any_of_twenty_seeds(simulated: World) -> None:
    for simulated.seed in range(20):
        verdict = judged(simulated, by_torch if simulated.seed % 4 == 0 else by_hand(OneFOneB))
        assert verdict.outcome == "pass", str(verdict)


@pytest.mark.parametrize("step", [by_hand(OneFOneB), by_torch], ids=["by_hand", "by_torch"])
def test_of_a_right_step_one_interleaving_is_all(step: Any, simulated: World) -> None:
    simulated.most = 50
    verdict = judged(simulated, step)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)
    assert [(one.found, one.complete) for one in simulated.explorations] == [(1, True)]


@pytest.mark.parametrize("runtime", RACES, ids=lambda runtime: runtime.__name__)
def test_a_race_needs_no_luck(runtime: type[OneFOneB], simulated: World) -> None:
    simulated.most = 50
    verdict = judged(simulated, by_hand(runtime))
    assert [cause.kind for cause in verdict.causes] == [RACES[runtime]], str(verdict)
    assert "interleaving=in-turn" in verdict.replay


def test_a_world_by_name_is_one_interleaving() -> None:
    step, build = by_hand(READS_EARLY), partial(blocks, RANKS)
    options: Any = {"reference": build, "microbatches": pairs(), "ranks": RANKS, "loss_fn": loss_fn}
    verdict = whitebox.validate(step, **options, world="simulated")
    assert [cause.kind for cause in verdict.causes] == ["read-before-wait"], str(verdict)
    assert verdict.replay.endswith(
        "--pipeproof-world=simulated --pipeproof-transport=unlimited --pipeproof-interleaving=0"
    )
    with pytest.raises(ValueError, match="kind is 'imagined': expected real or simulated"):
        whitebox.validate(step, **options, world="imagined")


def test_a_seed_gives_the_same_report_to_the_letter_in_any_process(simulated: World) -> None:
    with SimulatedWorld(seed=5, silent=True) as another:
        for runtime in (OneFOneB, *RACES, WAITS):
            simulated.seed = 5
            once, again, elsewhere = (str(judged(world, by_hand(runtime))) for world in (simulated, simulated, another))
            assert once == again == elsewhere
