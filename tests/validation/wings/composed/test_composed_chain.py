"""What flows back: a gradient that is lost is missed where it should have come, and one asked for in vain nowhere.

Of a loss that a step makes of what an inner stage gave, outside of all stages, nobody knows what is due there.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.records.step_check import check_step
from pipeproof.wings.composed import Composed
from pipeproof.worlds.world import World
from tests.support.chain_by_hand import Both, Chained, chain_step
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, checked, layers
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


Back = Callable[[Tensor, Tensor], Any]  # what an inner stage gave, and what flows back to it


class Outside(Job):
    """The middle one of three stages has a backward of its own kind."""

    back: Back

    def _back(self, k: int, made: list[Tensor], sent: Any) -> None:
        (gave,), ((_, came),) = made, sent[k, 0]
        assert came.grad is not None
        (self.back if k == 1 else _usual)(gave, came.grad)


def _usual(gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow)


def small(gave: Tensor) -> Tensor:
    return gave.square().mean() / len(DATA)


def before(gave: Tensor, flow: Tensor) -> None:
    small(gave).backward(retain_graph=True)
    gave.backward(flow)


def after(gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow, retain_graph=True)
    small(gave).backward()


def together(gave: Tensor, flow: Tensor) -> None:
    torch.autograd.backward([gave, small(gave)], [flow, None])


def summed(gave: Tensor, flow: Tensor) -> None:
    ((gave * flow).sum() + small(gave)).backward()


def multiplied(gave: Tensor, flow: Tensor) -> None:
    (gave * flow).sum().backward()


def doubled(gave: Tensor, flow: Tensor) -> None:
    (gave * flow * 2).sum().backward()


def kept(gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow, retain_graph=True)


def altered(gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow + small(gave).detach())


def verdict_of(back: Back, *, stages: list[nn.Module] | None = None) -> Verdict:
    job = Outside(stages or layers(torch.tanh, torch.sin, torch.tanh))
    job.back = back
    return checked(job)


@pytest.mark.parametrize("back", [before, after, together, summed])
def test_what_a_loss_outside_the_stages_adds_is_not_known(back: Back) -> None:
    verdict = verdict_of(back)
    assert verdict.verdict == "unknown", str(verdict)
    note = verdict.law("boundaries").note
    for told in ("comes to what stage 1 gave", "test_composed_chain.py", "output gradient of 1B0"):
        assert told in note
    assert verdict.law("gradient").outcome == "pass"


@pytest.mark.parametrize("back", [multiplied, kept])
def test_a_backward_that_brings_what_was_sent_is_right(back: Back) -> None:
    verdict = verdict_of(back)
    assert verdict.verdict == "pass", str(verdict)


@pytest.mark.parametrize(("back", "kind"), [(doubled, "scale"), (altered, "altered")])
def test_a_fault_that_no_loss_explains_is_one(back: Back, kind: str) -> None:
    verdict = verdict_of(back)
    assert verdict.verdict == "fail", str(verdict)
    assert [cause.kind for cause in verdict.cause] == [kind]


def test_a_backward_that_runs_twice_beside_such_a_loss_is_a_fault() -> None:
    def both(gave: Tensor, flow: Tensor) -> None:
        gave.backward(flow, retain_graph=True)
        before(gave, flow)

    verdict = verdict_of(both)
    assert verdict.verdict == "fail", str(verdict)
    assert [cause.kind for cause in verdict.cause] == ["doubled"]


class Hooked(nn.Module):
    """Where a gradient comes to what it gives, it calls for the backward of a loss of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        own = small(hidden)
        made = torch.sin(hidden)
        if made.requires_grad:
            made.register_hook(lambda flow: own.backward(retain_graph=True))
        return made


def test_a_backward_in_mid_backward_that_comes_to_what_a_stage_was_given_is_not_known() -> None:
    stages = layers(torch.tanh, torch.sin, torch.tanh)
    verdict = verdict_of(_usual, stages=[stages[0], Hooked(), stages[2]])
    assert verdict.verdict == "unknown", str(verdict)
    assert Reason.OWN_BACKWARD in verdict.law("boundaries").reasons, str(verdict)


class Twice(nn.Module):
    """Gives a tensor, and another one that is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.layer(x)
        return made, torch.tanh(made)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.layer(x * y)


class EachOutput(Job):
    """A backward for each output of a stage."""

    def _back(self, k: int, made: list[Tensor], sent: Any) -> None:
        for n, one in enumerate(made):
            for _, came in sent[k, n]:
                assert came.grad is not None
                one.backward(came.grad, retain_graph=True)


def one_by_one(job: Job) -> list[Verdict]:
    """Of as many steps as there are stages, one of which alone is run again in each."""
    by, found = Composed(MSE, stages="one by one"), list[Verdict]()
    for _ in job.stages:
        with check_step(dict(enumerate(job.stages)), job.data, against=by, rename="{}.{}".format) as check:
            job.step()
            check.gradients()
        nn.ModuleList(job.stages).zero_grad()
        found.append(check.verdict)
    return found


@pytest.mark.parametrize("kind", [Job, EachOutput])
def test_what_flows_from_one_output_to_another_is_known_where_the_stage_runs_again(kind: type[Job]) -> None:
    verdict = checked(kind([*layers(torch.tanh), Twice(), Product()]))
    assert verdict.verdict == "pass", str(verdict)
    first, own, _ = one_by_one(kind([*layers(torch.tanh), Twice(), Product()]))
    assert own.verdict == "pass", str(own)
    assert first.verdict == "unknown", str(first)
    assert Reason.LINK in first.law("boundaries").reasons, str(first)


def test_a_loss_outside_of_a_stage_that_is_not_run_again_is_not_known_either() -> None:
    job = Outside(layers(torch.tanh, torch.sin, torch.tanh))
    job.back = before
    for verdict in one_by_one(job):
        assert verdict.verdict == "unknown", str(verdict)
