"""A gradient that is lost on several hops is missed where it should have come, and one asked for in vain nowhere."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeproof.worlds.world import World
from tests.support.chain_by_hand import Both, Chained, chain_step
from tests.support.golden import golden
from tests.support.sweeps import each_once


class Writing(Both):
    """Writes to what it is given, as an activation in place does."""

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        own = given if given[0].requires_grad else tuple(one.mul_(1.5) for one in given)
        return super().forward(*own)


def writing(rank: int) -> nn.Module:
    return Writing().requires_grad_(rank > 0)


class Checkpointed(Both):
    """Runs its layer again in the backward, in a graph of its own."""

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = checkpoint(super().forward, *given, use_reentrant=True)
        return made


class Silent(Both):
    """Frozen, and called without gradients."""

    def __init__(self, how: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.how = how

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        with self.how():
            made: tuple[Tensor, ...] = super().__call__(*given)
        return made


def stage(rank: int, *, plain: int = -1, frozen: int = -1) -> nn.Module:
    made = Both(plain=rank == plain)
    return made.requires_grad_(rank != frozen)


def never(rank: int, *, ranks: frozenset[int]) -> bool:
    return rank not in ranks


@pytest.mark.parametrize("plain", [-1, 1])
@pytest.mark.parametrize("ranks", [{1}, {2}, {1, 2}])
def test_who_forgot_that_a_gradient_is_wanted_is_named(ranks: set[int], plain: int, simulated: World) -> None:
    way = Chained(partial(stage, plain=plain), wants=partial(never, ranks=frozenset(ranks)))
    verdict = simulated.run(chain_step, way, ranks=3)[0]
    assert verdict.verdict == "fail", str(verdict)
    assert verdict.cause[0].rank == min(ranks)
    golden(verdict.cause[0].detail)


@pytest.mark.parametrize(*each_once(plain=[-1, 1], wants=[(True, True), (False, True), (True, False), (False, False)]))
def test_nothing_is_lost_where_the_first_stage_is_frozen(
    plain: int, wants: tuple[bool, bool], simulated: World
) -> None:
    """A middle stage without parameters then gives nothing that brings a gradient, whoever asks it for one."""
    lost = frozenset(rank for rank, wanted in enumerate(wants, 1) if not wanted)
    way = Chained(partial(stage, plain=plain, frozen=0), wants=partial(never, ranks=lost))
    verdict = simulated.run(chain_step, way, ranks=3)[0]
    wrong = 2 in lost and plain != 1  # stage 1 has weights to be trained
    assert verdict.verdict == ("fail" if wrong else "pass"), str(verdict)


@pytest.mark.parametrize("wants", [True, False])
def test_a_stage_that_writes_to_what_it_is_given_is_right_however_often_it_runs_again(
    wants: bool, simulated: World
) -> None:
    """The frozen first stage's message may be asked for a gradient in vain; the next then runs once more to tell."""
    lost = frozenset(set() if wants else {1})
    way = Chained(writing, wants=partial(never, ranks=lost))
    verdict = simulated.run(chain_step, way, ranks=3)[0]
    assert (verdict.verdict, verdict.tier) == ("pass", "bitwise"), str(verdict)


def checkpointed(rank: int) -> nn.Module:
    return Checkpointed()


def silent(rank: int, *, how: Callable[[], AbstractContextManager[object]]) -> nn.Module:
    return Both() if rank else Silent(how)


def test_a_checkpoint_that_runs_in_a_graph_of_its_own_is_no_fault(simulated: World) -> None:
    verdict = simulated.run(chain_step, Chained(checkpointed, wants_first=True), ranks=3)[0]
    assert (verdict.verdict, verdict.tier) == ("pass", "bitwise"), str(verdict)


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode])
def test_a_frozen_stage_may_be_called_without_gradients(
    how: Callable[[], AbstractContextManager[object]], simulated: World
) -> None:
    verdict = simulated.run(chain_step, Chained(partial(silent, how=how)), ranks=2)[0]
    assert verdict.verdict == "pass", str(verdict)
