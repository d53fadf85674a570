"""What runs without gradients and again inside a backward is one call of a stage, with its own gradients."""

from functools import partial

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.two_ranks import COUNT, Call, called, judged, named, passes, plain, step, without_second
from validation.foreign import WhiteBox


def recomputed(stage: nn.Module, m: int, x: Tensor, *, reentrant: bool = True) -> Tensor:
    result: Tensor = checkpoint(stage, x if x.requires_grad else x.requires_grad_(), use_reentrant=reentrant)
    return result


def but_for_the_last(stage: nn.Module, m: int, x: Tensor) -> Tensor:
    return called(stage, m, x) if m == COUNT - 1 else recomputed(stage, m, x)


CHECKPOINTS = [recomputed, partial(recomputed, reentrant=False), but_for_the_last]


@pytest.mark.parametrize("call", CHECKPOINTS, ids=["reentrant", "not reentrant", "all but the last"])
def test_a_stage_in_a_checkpoint_runs_once_for_each_microbatch(whitebox: WhiteBox, call: Call) -> None:
    verdict = passes(judged(whitebox, partial(step, call=call), plain))
    assert verdict.law("microbatches").outcome == verdict.law("boundaries").outcome == "pass"
    assert verdict.law("boundaries").checked == verdict.law("boundaries").exact >= 28


def spoilt(stage: nn.Module, m: int, x: Tensor) -> Tensor:
    """What a checkpoint keeps of microbatch 1 is written to before its recompute."""
    result = recomputed(stage, m, x)
    if m == 1 and dist.get_rank() == 1:
        x.data.mul_(2)
    return result


def test_what_goes_wrong_in_a_checkpoint_is_named(whitebox: WhiteBox) -> None:
    found = named(judged(whitebox, partial(step, call=partial(without_second, call=recomputed)), plain))
    assert found[0] == ("dropped", 0, 0, (2,)), found
    found = named(judged(whitebox, partial(step, call=spoilt), plain))
    assert found[0] == ("overwritten", 1, 1, (1,)), found
    half_of_it = partial(step, call=recomputed, passed=lambda m, gradient: gradient / 2 if m == 1 else gradient)
    assert named(judged(whitebox, half_of_it, plain))[0] == ("scale", 0, 0, (1,))
