"""Which inputs of stages are which outputs and data: what is open is told, and what may hide a fault is unknown."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.sketch import sketch
from pipeproof.core.reason import Reason, reasons_of
from pipeproof.wings.composed.chain import Chain, place_of
from pipeproof.wings.composed.link import StageCalls
from pipeproof.wings.composed.wiring import refusals
from pipeproof.worlds.world import World
from tests.support.chain_by_hand import Both, Chained, chain_step
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, Job, checked, layers

INPUT, OUTPUT = place_of((None, 1)), place_of((0, 1))


def signs(rank: int) -> nn.Module:
    return Both() if rank else Both(second=torch.sign)  # no gradient flows to that


def onward(rank: int) -> nn.Module:
    return Both(second=torch.Tensor.detach)


def altered(rank: int, tensors: list[Tensor]) -> list[Tensor]:
    return [tensors[0], tensors[1].cos()] if rank == 1 else tensors


def picked(rank: int, tensors: list[Tensor], *, at: int, order: list[int]) -> list[Tensor]:
    return [tensors[k] for k in order] if rank == at else tensors


def given(at: int, *order: int) -> partial[list[Tensor]]:
    return partial(picked, at=at, order=list(order))


CHAINS: dict[str, tuple[Chained, int, str, Any]] = {  # how many ranks run it, the outcome, and what is open or noted
    "one stage": (Chained(inputs=2), 1, "pass", ""),
    "three stages": (Chained(inputs=2), 3, "pass", ""),
    "one tensor in two places": (Chained(given=given(0, 0, 0)), 1, "pass", ""),
    "one message in two places": (Chained(given=given(1, 0, 0)), 2, "pass", ""),
    "labels among the inputs": (Chained(given=given(0, 0, 0), inputs=2, labels=True), 1, "pass", ""),
    "data of another use": (Chained(given=given(0, 0), inputs=2), 1, "pass", None),
    "inputs in another order": (Chained(given=given(0, 1, 0), inputs=2), 2, "pass", None),
    "messages in another order": (Chained(given=given(1, 1, 0), inputs=2), 2, "pass", None),
    "an input that is given twice": (Chained(given=given(0, 0, 0), inputs=2), 2, "unknown", (INPUT,)),
    "a message that is given twice": (Chained(given=given(1, 0, 0), inputs=2), 2, "unknown", (OUTPUT,)),
    "and no gradient flows to the other": (Chained(signs, given(1, 0, 0), inputs=2), 2, "unknown", (OUTPUT,)),
    "one is altered and passed on": (Chained(onward, altered, inputs=2), 3, "fail", ("altered", 1)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_where_inputs_come_from(name: str, simulated: World) -> None:
    """Arguments may be given by name in any order, so that it is no fault; but it is noted what was taken as meant."""
    way, ranks, outcome, said = CHAINS[name]
    verdict = simulated.run(chain_step, way, ranks=ranks)[0]
    law = verdict.law("boundaries")
    assert verdict.outcome == outcome, str(verdict)
    if said is None:
        golden(law.note)
    elif outcome == "pass":
        assert (law.note, verdict.tier) == (said, "bitwise")
    elif outcome == "unknown":
        assert (law.left_out, law.reasons) == (said, (Reason.WIRING,))
    else:
        assert (verdict.causes[0].kind, verdict.causes[0].rank) == said


class Placed(nn.Module):
    """Gives what it computes, and the positions, which are the same for every microbatch."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(8, 8), given

    def forward(self, x: Tensor, *positions: Tensor) -> tuple[Tensor, ...] | Tensor:
        out: Tensor = self.layer(x)
        return out + positions[0] if positions else (out, torch.arange(8)) if self.given else out


@pytest.mark.parametrize(("by_stage", "said"), [(True, "unknown"), (False, "pass")])
def test_other_positions_than_were_sent_are_open(by_stage: bool, said: str) -> None:
    def shifted(stage: int, microbatch: int, given: list[Tensor]) -> list[Tensor]:
        return [given[0], torch.arange(1, 9)] if stage else given

    verdict = checked(Job([Placed(by_stage), Placed(False)], fault=shifted))
    assert verdict.outcome == said, str(verdict)
    assert verdict.law("boundaries").reasons == (Reason.WIRING,) * by_stage
    assert verdict.law("boundaries").left_out == (OUTPUT,) * by_stage


@pytest.mark.parametrize("given", [1, 2])
def test_more_calls_than_microbatches_are_told(given: int) -> None:
    verdict = checked(Job(layers(torch.tanh, torch.tanh)), given=DATA[:given])
    assert verdict.outcome == "unknown", str(verdict)
    assert verdict.law("comparable").reasons == (Reason.CALLS,)
    golden(verdict.law("comparable").note)


def test_what_a_stage_gives_later_is_not_seen() -> None:
    observed = {number: StageCalls(0, (Call(True, outputs=[sketch(DATA[0][0])] * number),)) for number in range(3)}
    golden("\n".join(refusals(Chain(observed, [{}]))))
    assert not [*refusals(Chain({0: observed[1], 1: observed[0]}, [{}]))], "of the last one the loss is another's"


@pytest.mark.parametrize(("calls", "reasons"), [(1, (Reason.CALLS,)), (3, ())])
def test_a_call_on_all_microbatches_is_not_known(calls: int, reasons: tuple[Reason, ...]) -> None:
    """The first stage is called on each of three; the second as often on nothing that was sent."""
    given, made, other = ([sketch(x + k) for x, _ in DATA] for k in range(3))
    first = tuple(Call(True, inputs=[x], outputs=[y]) for x, y in zip(given, made, strict=True))
    last = tuple(Call(True, inputs=[x]) for x in other[:calls])
    chain = Chain({0: StageCalls(0, first), 1: StageCalls(1, last)}, [{0: one} for one in given])
    assert reasons_of(*refusals(chain)) == reasons
