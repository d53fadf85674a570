"""Steps in mixed precision: what only looks like a forgotten convention is not called one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeproof.wings.specimens.mixed import LAST, MIXED, RIGHT, MixedCase, try_mixed, validate_mixed
from pipeproof.wings.specimens.mixed_step import MixedPrecision, MixedStep
from pipeproof.worlds.world import World
from tests.support.golden import golden

SCALED = MixedPrecision(scale=1024.0)
BF16 = MixedPrecision(weights=torch.bfloat16, main_grad=True, masters=True)


class HalfUnscaled(MixedStep):
    """A factor that is not the loss scale."""

    def unscale(self) -> None:
        super().unscale()
        for one in self.gradients.values():
            one.mul_(512.0)


class HalfScaled(MixedStep):
    def scale(self, loss: Tensor) -> Tensor:
        return super().scale(loss) * 2.0


class OneWeightStill(MixedStep):
    """One weight of a rank is left as it was, and the others move."""

    @torch.no_grad()
    def update(self) -> None:
        first = next(iter(self.held.values()))
        before = first.clone()
        super().update()
        if self.rank == LAST:
            first.copy_(before)
            self.copy_back()


class NoOptimizer(MixedStep):
    """Nobody moves anything."""

    def overflows(self) -> bool:
        return True


class AddedBackwards(MixedStep):
    """Sums in fp32 that are right, and rounded at last: their bits are not those of sums in bf16."""

    def give_to_optimizer(self) -> None:
        self.sums = {name: one.bfloat16().float() for name, one in self.sums.items()}
        super().give_to_optimizer()


class InputRounded(MixedStep):
    """The data of the first stage is rounded: no stage has sent it."""

    def forwards(self, microbatches: object) -> None:
        pairs = [(x.bfloat16().float() if self.rank == 0 else x, y) for x, y in microbatches]  # type: ignore[attr-defined]
        super().forwards(pairs)


class MastersMovedTwice(MixedStep):
    """Master copies are moved too far, and copied back."""

    @torch.no_grad()
    def copy_back(self) -> None:
        for one in self.masters.values() if self.rank == LAST else ():
            one.mul_(1.01)
        super().copy_back()


UNSCALED = MIXED["never-unscaled"]
OTHERS: dict[str, tuple[MixedPrecision, type[MixedStep], set[str]]] = {
    "a factor that is half the scale": (SCALED, HalfUnscaled, {"scale"}),
    "a loss that is twice too large": (SCALED, HalfScaled, {"scale"}),
    "the scale is also the number of microbatches": (replace(SCALED, scale=4.0), UNSCALED.step, {"scale"}),
    "one weight that stays": (SCALED, OneWeightStill, {"update"}),
    "all ranks skip": (SCALED, NoOptimizer, {"update"}),
    "sums that are rounded at last": (BF16, AddedBackwards, {"rounded"}),
    "a message's data is rounded": (MixedPrecision(), InputRounded, {"rounded", "altered"}),
    "masters that moved otherwise": (BF16, MastersMovedTwice, {"update", "clip"}),
}


@pytest.mark.sampled(2)
@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("title", OTHERS)
def test_no_forgotten_convention_is_not_called_one(title: str, world: World) -> None:
    way, step, kinds = OTHERS[title]
    verdict = validate_mixed(MixedCase(way, step, name="near"), world)
    assert verdict.outcome == "fail", str(verdict)
    assert {cause.kind for cause in verdict.causes} <= kinds, str(verdict)
    if step is UNSCALED.step:  # the scale is also a count, and is told as both
        golden("\n".join(cause.detail for cause in verdict.causes), numbers=False)


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_trials_tell_what_was_caught(world: World) -> None:
    right = try_mixed(replace(MIXED["loss-scaled-twice"], step=MixedStep), world)
    assert (right.caught, right.laws) == (False, ()), "a fault that is none"
    one = MIXED["unscaled-twice"]
    trial = try_mixed(replace(one, fault=replace(one.fault, rank=None)), world)
    assert (trial.recorded.right, trial.recorded.located) == (True, False), "a rank that is named alone is not all"


def test_right_steps_have_names() -> None:
    assert [one.name for one in RIGHT.values()] == [*RIGHT]
