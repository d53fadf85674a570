"""Which inputs of stages are which outputs and data: what is open is told, and what may hide a fault is unknown."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.reason import Reason
from pipeproof.observers.calls import Call
from pipeproof.observers.sketch import sketch
from pipeproof.wings.composed.chain import Chain, place_of
from pipeproof.wings.composed.link import StageSeen
from pipeproof.wings.composed.wiring import refusals
from pipeproof.worlds.world import World
from tests.support.chain_by_hand import Both, Chained, chain_step
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, Job, checked, layers

INPUT, OUTPUT = place_of((None, 1)), place_of((0, 1))


class Beside(nn.Module):
    """Gives a tensor that no gradient flows to beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Both()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, ...] = self.both(x, y)
        return made[0], torch.sign(y.detach())


class Onward(nn.Module):
    """Passes its second input on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Both()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.both(x, y)[0], y.detach()


def built(rank: int) -> nn.Module:
    return Both() if rank else Beside()


def altered(rank: int, tensors: list[Tensor]) -> list[Tensor]:
    return [tensors[0], tensors[1].cos()] if rank == 1 else tensors


def picked(rank: int, tensors: list[Tensor], *, at: int, order: list[int]) -> list[Tensor]:
    return [tensors[k] for k in order] if rank == at else tensors


def given(at: int, *order: int) -> partial[list[Tensor]]:
    return partial(picked, at=at, order=list(order))


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_given_in_its_order_is_right(ranks: int, simulated: World) -> None:
    verdict = simulated.run(chain_step, Chained(inputs=2), ranks=ranks)[0]
    assert (verdict.verdict, verdict.law("boundaries").note) == ("pass", ""), str(verdict)


def test_an_input_that_is_given_twice_leaves_open_where_the_other_went(simulated: World) -> None:
    verdict = simulated.run(chain_step, Chained(given=given(0, 0, 0), inputs=2), ranks=2)[0]
    assert verdict.verdict == "unknown"
    assert verdict.law("boundaries").left_out == (INPUT,)
    assert verdict.law("boundaries").reasons == (Reason.WIRING,)


def test_a_message_that_is_given_twice_leaves_open_where_the_other_went(simulated: World) -> None:
    both = simulated.run(chain_step, Chained(given=given(1, 0, 0), inputs=2), ranks=2)[0]
    assert both.verdict == "unknown"
    assert both.law("boundaries").left_out == (OUTPUT,)
    beside = simulated.run(chain_step, Chained(built, given(1, 0, 0), inputs=2), ranks=2)[0]
    assert beside.verdict == "unknown", str(beside)
    assert beside.law("boundaries").left_out == (OUTPUT,)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_tensor_in_two_places_is_right(ranks: int, simulated: World) -> None:
    verdict = simulated.run(chain_step, Chained(given=given(ranks - 1, 0, 0)), ranks=ranks)[0]
    assert (verdict.verdict, verdict.tier) == ("pass", "bitwise"), str(verdict)


def test_labels_among_the_inputs_went_into_the_loss(simulated: World) -> None:
    verdict = simulated.run(chain_step, Chained(given=given(0, 0, 0), inputs=2, labels=True), ranks=1)[0]
    assert (verdict.verdict, verdict.law("boundaries").note) == ("pass", ""), str(verdict)


def test_data_of_another_use_is_told_and_is_no_fault(simulated: World) -> None:
    verdict = simulated.run(chain_step, Chained(given=given(0, 0), inputs=2), ranks=1)[0]
    assert verdict.verdict == "pass"
    golden(verdict.law("boundaries").note)


class Placed(nn.Module):
    """Gives what it computes, and the positions, which are the same for every microbatch."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(8, 8), given

    def forward(self, x: Tensor, *positions: Tensor) -> tuple[Tensor, ...] | Tensor:
        out: Tensor = self.layer(x)
        return out + positions[0] if positions else (out, torch.arange(8)) if self.given else out


@pytest.mark.parametrize(("by_stage", "said"), [(True, "unknown"), (False, "pass")])
def test_positions_that_are_others_than_were_sent_are_open_and_a_rank_s_own_are_not(by_stage: bool, said: str) -> None:
    def shifted(stage: int, microbatch: int, given: list[Tensor]) -> list[Tensor]:
        return [given[0], torch.arange(1, 9)] if stage else given

    verdict = checked(Job([Placed(by_stage), Placed(False)], fault=shifted))
    assert verdict.verdict == said, str(verdict)
    assert verdict.law("boundaries").reasons == (Reason.WIRING,) * by_stage
    assert verdict.law("boundaries").left_out == (OUTPUT,) * by_stage


def test_what_is_altered_and_passed_on_is_no_other_place_s(simulated: World) -> None:
    verdict = simulated.run(chain_step, Chained(lambda rank: Onward(), altered, inputs=2), ranks=3)[0]
    assert verdict.verdict == "fail"
    assert (verdict.cause[0].kind, verdict.cause[0].rank) == ("altered", 1), str(verdict)


@pytest.mark.parametrize("at", [0, 1])
def test_an_order_that_is_another_in_every_call_is_told(at: int, simulated: World) -> None:
    """Arguments may be given by name in any order, so that it is no fault; but readers know what was taken as meant."""
    verdict = simulated.run(chain_step, Chained(given=given(at, 1, 0), inputs=2), ranks=2)[0]
    assert verdict.verdict == "pass"
    golden(verdict.law("boundaries").note)


@pytest.mark.parametrize("given", [1, 2])
def test_more_calls_than_microbatches_were_given_are_told_so(given: int) -> None:
    verdict = checked(Job(layers(torch.tanh, torch.tanh)), given=DATA[:given])
    assert verdict.verdict == "unknown", str(verdict)
    assert verdict.law("comparable").reasons == (Reason.CALLS,)
    golden(verdict.law("comparable").note)


def test_what_comes_out_of_a_stage_later_is_not_seen() -> None:
    seen = {number: StageSeen(0, (Call(True, outputs=[sketch(DATA[0][0])] * number),)) for number in range(3)}
    golden("\n".join(refusals(Chain(seen, [{}]))))
    assert not [*refusals(Chain({0: seen[1], 1: seen[0]}, [{}]))], "of the last one the loss is another's"


class Batched(Job):
    """The second stage is called once, on all microbatches."""

    def step(self) -> list[float]:
        gave = [self.stages[0](x) for x, _ in self.data]
        given = torch.cat([one.detach() for one in gave]).requires_grad_()
        parts = self.stages[1](given).chunk(len(gave))
        losses = [self.loss_fn(one, target) for one, (_, target) in zip(parts, self.data, strict=True)]
        (torch.stack(losses).sum() / len(losses)).backward()
        assert given.grad is not None
        for one, flow in zip(gave, given.grad.chunk(len(gave)), strict=True):
            one.backward(flow)
        return [one.item() for one in losses]


def test_a_stage_that_is_called_on_all_microbatches_at_once_is_not_known() -> None:
    verdict = checked(Batched(layers(torch.tanh, torch.sin)))
    assert verdict.verdict == "unknown", str(verdict)
    assert verdict.law("comparable").reasons == (Reason.CALLS,)
