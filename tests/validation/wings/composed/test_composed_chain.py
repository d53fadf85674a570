"""What flows back: a gradient that is lost is missed where it should have come, and one asked for in vain nowhere.

Of a loss that a step makes of what an inner stage gave, outside of all stages, it is not known what is expected there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeproof.core.reason import Reason
from pipeproof.worlds.world import World
from tests.support.chain_by_hand import Both, Chained, chain_step
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, Job, Layer, OneByOne, checked, layers, one_by_one


class Writing(Both):
    """Writes to what it is given, as an activation in place does."""

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        own = given if given[0].requires_grad else tuple(one.mul_(1.5) for one in given)
        return super().forward(*own)


class Checkpointed(Both):
    """Runs its layer again in the backward, in a graph of its own."""

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return checkpoint(super().forward, *given, use_reentrant=True)


class Silent(Both):
    """Frozen, and called without gradients."""

    def __init__(self, how: Callable[[], Any]) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.how = how

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        with self.how():
            made: tuple[Tensor, ...] = super().__call__(*given)
        return made


def stage(rank: int, *, plain: int = -1, frozen: int = -1) -> nn.Module:
    return Both(plain=rank == plain).requires_grad_(rank != frozen)


def writing(rank: int) -> nn.Module:
    return Writing().requires_grad_(rank > 0)


def checkpointed(rank: int) -> nn.Module:
    return Checkpointed()


def silent(rank: int, *, how: Callable[[], Any]) -> nn.Module:
    return Both() if rank else Silent(how)


def never(rank: int, *, ranks: frozenset[int]) -> bool:
    return rank not in ranks


def lost(*ranks: int, build: Callable[[int], nn.Module] = stage) -> Chained:
    """A chain of which these ranks forget that messages want gradients."""
    return Chained(build, wants=partial(never, ranks=frozenset(ranks)))


FIRST_FROZEN = partial(stage, frozen=0)
PLAIN_BETWEEN = partial(stage, plain=1, frozen=0)  # it gives nothing that brings a gradient, whoever asks it for one
CHAINS: dict[str, tuple[Chained, int | None]] = {
    "the second forgets": (lost(1), 1),
    "the third forgets": (lost(2), 2),
    "both forget": (lost(1, 2), 1),
    "a plain one forgets": (lost(1, build=partial(stage, plain=1)), 1),
    "the one behind a plain one forgets": (lost(2, build=partial(stage, plain=1)), 2),
    "both forget, one is plain": (lost(1, 2, build=partial(stage, plain=1)), 1),
    "behind a frozen one it is not needed": (lost(1, build=FIRST_FROZEN), None),
    "one stage later it is": (lost(2, build=FIRST_FROZEN), 2),
    "behind two that train nothing it is not": (lost(1, 2, build=PLAIN_BETWEEN), None),
    "nor is it asked for there": (lost(build=PLAIN_BETWEEN), None),
    "stages write to what they are given": (lost(build=writing), None),
    "they do, and one does not ask": (lost(1, build=writing), None),
    "a checkpoint has a graph of its own": (Chained(checkpointed, wants_first=True), None),
    "a frozen stage runs without gradients": (Chained(partial(silent, how=torch.no_grad)), None),
    "and in inference mode": (Chained(partial(silent, how=torch.inference_mode)), None),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHAINS)
def test_who_forgot_that_a_gradient_is_wanted(name: str, simulated: World) -> None:
    way, rank = CHAINS[name]
    verdict = simulated.run(chain_step, way, ranks=3)[0]
    assert verdict.outcome == ("pass" if rank is None else "fail"), str(verdict)
    assert [cause.rank for cause in verdict.causes[:1]] == ([] if rank is None else [rank])
    if rank is None:
        assert verdict.tier == "bitwise"
    else:
        golden(verdict.causes[0].detail)


Back = Callable[[Tensor, Tensor], Any]  # what an inner stage gave, and what flows back to it


class Outside(Job):
    """The middle one of three stages has a backward of its own kind."""

    back: Back

    def _back(self, k: int, made: list[Tensor], sent: Any) -> None:
        (gave,), ((_, came),) = made, sent[k, 0]
        assert came.grad is not None
        (self.back if k == 1 else usual)(gave, came.grad)


def usual(gave: Tensor, flow: Tensor) -> None:
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


def multiplied(gave: Tensor, flow: Tensor, *, by: float = 1.0) -> None:
    (gave * flow * by).sum().backward()


def kept(gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow, retain_graph=True)


def altered(gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow + small(gave).detach())


def twice(gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow, retain_graph=True)
    before(gave, flow)


def with_back(back: Back, *, stages: list[nn.Module] | None = None) -> Outside:
    job = Outside(stages or layers(torch.tanh, torch.sin, torch.tanh))
    job.back = back
    return job


@pytest.mark.parametrize("back", [before, after, together, summed])
def test_a_loss_outside_of_stages_is_not_known(back: Back) -> None:
    verdict = checked(with_back(back))
    assert verdict.outcome == "unknown", str(verdict)
    note = verdict.law("boundaries").note
    for told in ("comes to what stage 1 gave", "test_composed_chain.py", "output gradient of 1B0"):
        assert told in note
    assert verdict.law("gradient").outcome == "pass"


@pytest.mark.parametrize(
    ("back", "kinds"),
    [
        (multiplied, []),
        (kept, []),
        (partial(multiplied, by=2), ["scale"]),
        (altered, ["altered"]),
        (twice, ["doubled"]),
    ],
)
def test_a_backward_that_no_loss_explains(back: Back, kinds: list[str]) -> None:
    verdict = checked(with_back(back))
    assert verdict.outcome == ("fail" if kinds else "pass"), str(verdict)
    assert [cause.kind for cause in verdict.causes] == kinds


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


def test_a_backward_within_a_backward_is_not_known() -> None:
    stages = layers(torch.tanh, torch.sin, torch.tanh)
    verdict = checked(with_back(usual, stages=[stages[0], Hooked(), stages[2]]))
    assert verdict.outcome == "unknown", str(verdict)
    assert Reason.OWN_BACKWARD in verdict.law("boundaries").reasons, str(verdict)


@pytest.mark.parametrize("kind", [Job, OneByOne])
def test_flows_between_outputs_are_known_from_reruns(kind: type[Job]) -> None:
    stages = [*layers(torch.tanh), Layer(lambda y: (y, torch.tanh(y))), Layer(lambda y: y, of=torch.mul)]
    verdict = checked(kind(stages))
    assert verdict.outcome == "pass", str(verdict)
    nn.ModuleList(stages).zero_grad()
    first, own, _ = one_by_one(kind(stages))
    assert own.outcome == "pass", str(own)
    assert first.outcome == "unknown", str(first)
    assert Reason.LINK in first.law("boundaries").reasons, str(first)


@pytest.mark.parametrize("inner", [nn.Tanh(), Layer(trained=False)], ids=["none", "frozen"])
def test_a_stage_may_have_nothing_to_train(inner: nn.Module) -> None:
    first, last = layers(torch.tanh, torch.sin)
    for verdict in one_by_one(Job([first, inner, last])):
        assert verdict.outcome == "pass", str(verdict)


def test_a_frozen_weight_has_no_gradient() -> None:
    (first, last), frozen = layers(torch.tanh, torch.sin), Layer(trained=False)
    frozen.layer.weight.grad = torch.ones(8, 8)
    _, verdict, _ = one_by_one(Job([first, frozen, last]))
    assert [law.outcome for law in verdict.laws if law.name == "presence"] == ["fail"]


def test_a_loss_outside_is_not_known_unrerun() -> None:
    for verdict in one_by_one(with_back(before)):
        assert verdict.outcome == "unknown", str(verdict)
