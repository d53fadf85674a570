"""Weights after a step that no optimizer of the check holds, and those that several do."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pipeproof import Composed, check_step
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden

WIDTH, ROWS = 8, 4


def step(context: RankContext, told: str, harm: str) -> Verdict:
    """One step of a stage of three layers, the last of them frozen; two optimizers take a step, and one may be told."""
    torch.manual_seed(context.rank)
    stage = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    stage[2].requires_grad_(False)
    both: Sequence[Optimizer] = [
        torch.optim.SGD(stage[0].parameters(), lr=0.1),
        torch.optim.AdamW(stage[1].parameters(), lr=0.1),
    ]
    by = {"both": both, "first": both[0]}[told]
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)) for _ in range(2)]
    other, loss_fn = 1 - context.rank, nn.functional.mse_loss
    against = Composed(loss_fn, optimizer=by)
    with check_step({context.rank: stage}, data, against=against, rename="{}.{}".format, timeout_s=20) as check:
        for x, target in data:
            if context.rank:
                x = torch.empty(ROWS, WIDTH)
                dist.recv(x, other)
                x.requires_grad_()
                (loss_fn(stage(x), target) / len(data)).backward()
                dist.send(x.grad, other)
            else:
                y, flow = stage(x), torch.empty(ROWS, WIDTH)
                dist.send(y.detach(), other)
                dist.recv(flow, other)
                y.backward(flow)
        check.gradients()
        for one in both:
            one.step()
        with torch.no_grad():
            if harm == "frozen":
                stage[2].weight.mul_(0.5)
            if harm == "second":
                stage[1].weight.mul_(0.5)
    return check.verdict


def law(verdict: Verdict) -> tuple[str, tuple[str, ...], tuple[Reason, ...]]:
    found = verdict.law("updated-parameters")
    return found.outcome, found.left_out, found.reasons


def test_what_several_optimizers_hold_is_compared(world: World) -> None:
    verdict = world.run(step, "both", "", ranks=2)[0]
    assert verdict.verdict == "pass", str(verdict)
    assert verdict.law("updated-parameters").checked == 8
    verdict = world.run(step, "both", "second", ranks=2)[0]
    assert {one.parameter for one in verdict.mismatches} == {"0.1.weight", "1.1.weight"}


def test_what_trains_and_nobody_is_known_to_hold_is_not_known(world: World) -> None:
    outcome, left_out, reasons = law(world.run(step, "first", "", ranks=2)[0])
    assert (outcome, sorted(left_out)) == ("unknown", ["0.1.bias", "0.1.weight", "1.1.bias", "1.1.weight"])
    assert reasons == (Reason.OPTIMIZER,)


def test_what_is_frozen_and_moves_is_told(world: World) -> None:
    outcome, left_out, reasons = law(world.run(step, "both", "frozen", ranks=2)[0])
    assert (outcome, sorted(left_out)) == ("unknown", ["0.2.weight", "1.2.weight"])
    assert reasons == (Reason.OPTIMIZER,)


@pytest.mark.parametrize("wrong", [3, [3]])
def test_what_is_no_optimizer_is_refused(wrong: object, world: World) -> None:
    verdict = world.run(refused, wrong, ranks=1)[0]
    golden(str(verdict).splitlines()[0])


def refused(context: RankContext, wrong: object) -> Verdict:
    against = Composed(nn.functional.mse_loss, optimizer=wrong)  # type: ignore[arg-type]  # it is refused
    with check_step(nn.Linear(2, 2), [(torch.ones(1, 2), torch.ones(1, 2))], against=against, timeout_s=20) as check:
        pass
    return check.verdict
