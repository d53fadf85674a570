"""How often and in which mode a stage ran is a fault only where it shows in what was computed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import PipelineSchedule
from tests.support.two_ranks import (
    COUNT,
    Call,
    all_forward_all_backward,
    called,
    half,
    judged,
    loss_fn,
    model_of,
    named,
    passes,
    plain,
    plain_block,
    step,
    without_second,
)
from validation.foreign import WhiteBox, watch

# Calls that hooks do not see.


def by_forward(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    result: Tensor = stage.forward(x)
    return result


def by_parts(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    assert isinstance(stage, nn.Sequential)
    for part in stage:
        x = part(x)
    return x


def now_and_then(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    return by_forward(stage, microbatch, x) if microbatch % 2 else called(stage, microbatch, x)


@pytest.mark.parametrize("call", [by_forward, by_parts])
def test_a_watched_stage_without_calls_decides_nothing(whitebox: WhiteBox, call: Call) -> None:
    verdict = passes(judged(whitebox, partial(step, call=call), plain))
    for law in ("microbatches", "boundaries"):
        assert verdict.law(law).outcome == "not applicable"
        assert "no call of watched stage 0 was seen" in verdict.law(law).note
        assert "call stage(x)" in verdict.law(law).note


def test_calls_of_one_rank_alone_are_judged_alone(whitebox: WhiteBox) -> None:
    def call(stage: nn.Module, m: int, x: Tensor) -> Tensor:
        return (by_forward if dist.get_rank() else called)(stage, m, x)

    verdict = passes(judged(whitebox, partial(step, call=call), plain))
    assert "no call of watched stage 1 was seen" in verdict.law("boundaries").note


def test_calls_of_some_microbatches_decide_nothing(whitebox: WhiteBox) -> None:
    verdict = passes(judged(whitebox, partial(step, call=now_and_then), plain))
    assert "and its gradients are right" in verdict.law("microbatches").note


@pytest.mark.parametrize("call", [by_forward, now_and_then, called])
def test_a_dropped_microbatch_is_named_however_a_stage_is_called(whitebox: WhiteBox, call: Call) -> None:
    found = named(judged(whitebox, partial(step, call=partial(without_second, call=call)), plain))
    assert found[0] == ("dropped", 0, 0, (2,)), found


# First stages that are not trained.


def by_own_schedule(model: nn.Sequential, microbatches: list[Any]) -> Any:
    stage = watch(half(model))
    schedule = PipelineSchedule(
        kind="1F1B", n_microbatches=COUNT, stages=[stage], loss_fn=loss_fn, pp_group=dist.group.WORLD
    )
    known = schedule.accumulate(microbatches)
    return stage, [known[m] for m in sorted(known)] or None


@pytest.mark.parametrize("frozen", [1, 2, 3])
@pytest.mark.parametrize("one", [step, by_own_schedule])
def test_a_frozen_stage_owes_no_backward(whitebox: WhiteBox, one: Callable[..., Any], frozen: int) -> None:
    passes(judged(whitebox, one, partial(plain, frozen=frozen)))


def test_faults_behind_a_frozen_stage_are_named(whitebox: WhiteBox) -> None:
    def dropped(stage: nn.Module, m: int, x: Tensor) -> Tensor:
        result = called(stage, m, x)
        return result.detach().requires_grad_() if m == 2 and dist.get_rank() == 1 else result

    def thawed(model: nn.Sequential, microbatches: list[Any]) -> Any:
        return step(model.requires_grad_(True), microbatches)

    build = partial(plain, frozen=2)
    assert named(judged(whitebox, partial(step, call=dropped), build))[0] == ("dropped", 1, 1, (2,))
    assert {kind for kind, *_ in named(judged(whitebox, thawed, build))} == {"unexpected"}


# Modes and calls that change nothing that was computed.


in_evaluation_mode = partial(step, training=False)


def with_metric(model: nn.Sequential, microbatches: list[Any], *, first: bool = False) -> Any:
    """Rank 0 calls its stage twice more, without any backward."""
    stage, again = watch(half(model)), [x for x, _ in microbatches[1:3]] if dist.get_rank() == 0 else []
    before = [stage(x) for x in again if first]
    losses = all_forward_all_backward(stage, microbatches)
    assert len(before) + len([stage(x) for x in again if not first]) == len(again)
    return stage, losses


@pytest.mark.parametrize("one", [in_evaluation_mode, with_metric, partial(with_metric, first=True)])
def test_a_mode_or_a_call_that_changes_nothing_is_no_fault(whitebox: WhiteBox, one: Callable[..., Any]) -> None:
    passes(judged(whitebox, one, plain))


class Fades(nn.Module):
    """Another computation in evaluation mode, by what is no dropout of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.9 if self.training else x


def test_a_mode_that_changes_what_is_computed_is_named(whitebox: WhiteBox) -> None:
    found = judged(whitebox, in_evaluation_mode, partial(model_of, lambda: nn.Sequential(plain_block(), Fades())))
    assert named(found)[0][0] == "mode"


def test_a_mode_that_changes_nothing_is_not_blamed_for_another_fault(whitebox: WhiteBox) -> None:
    both = partial(in_evaluation_mode, passed=lambda m, gradient: gradient / 2 if m == 1 else gradient)
    assert named(judged(whitebox, both, plain)) == [("scale", 0, 0, (1,))]
