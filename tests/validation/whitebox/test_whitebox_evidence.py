"""Causes of foreign steps: each fault has its own, and what nothing decides stays open."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import backward, blocks, loss_fn, pairs
from tests.support.two_ranks import half, named, one_by_one

WIDTH, COUNT = 8, 4
EVERY = (0, 1, 2, 3)
Change = Callable[[int, Tensor], Tensor]
Step = Callable[[Any, list[Any]], Any]
Named = tuple[str, int | None, int | None, tuple[int, ...]]

build_model = partial(blocks, seed=3)
data = partial(pairs, COUNT, rows=6)


def own(model: Any) -> Any:
    return watch(half(model))


def train(stage: nn.Module, microbatches: list[Any], received: Change = lambda m, x: x) -> Any:
    return stage, one_by_one(stage, microbatches, received)


def judged(whitebox: WhiteBox, step: Step, **more: Any) -> Verdict:
    wanted = {"reference": build_model, "microbatches": data(), "ranks": 2, "loss_fn": loss_fn} | more
    return whitebox.validate(step, **wanted)


@pytest.mark.sweep
def test_a_right_step_has_no_cause(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, lambda model, microbatches: train(own(model), microbatches))
    assert (verdict.outcome, verdict.causes, verdict.undecided) == ("pass", (), ())
    ran = verdict.measured.ran
    rows = [" ".join(done.action for done in row) for row in ran.ranks]
    assert rows == [" ".join(f"{stage}F{m} {stage}B{m}" for m in range(4)) for stage in (0, 1)]
    assert {one.error for row in ran.ranks for done in row for one in done.sights if one.agrees} == {0}


@dataclass(frozen=True)
class Fault:
    """A step, its causes, what else could be, and whether its text is golden; ``more``: of what else it is judged."""

    step: Step
    causes: list[Named] = field(default_factory=list)
    others: list[str] | None = None
    told: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def received(change: Change) -> Step:
    return lambda model, microbatches: train(own(model), microbatches, change)


def unwatched_before(change: Change) -> Step:
    """Nobody watches the stage before, so what came in may have been sent so."""
    return lambda model, microbatches: train(own(model) if dist.get_rank() else half(model), microbatches, change)


def given(change: Callable[[list[Any]], list[Any]]) -> Step:
    return lambda model, microbatches: train(own(model), change(microbatches))


def inputs_of(*drawn: int) -> Step:
    return given(lambda all_: [(all_[m][0], target) for m, (_, target) in zip(drawn, all_, strict=True)])


def noise(*at: int) -> Change:
    return lambda m, x: torch.randn_like(x) if m in at else x


def little_noise(m: int, x: Tensor) -> Tensor:
    return x if m == 2 else x + 0.05 * x.norm() / x.numel() ** 0.5 * torch.randn_like(x)


def replayed(model: Any, microbatches: list[Any]) -> Any:
    """Microbatch 1 comes in place of 2."""
    kept: list[Tensor] = []

    def change(m: int, x: Tensor) -> Tensor:
        kept.append(x.clone())
        return kept[1].clone() if m == 2 else x

    return train(own(model), microbatches, change)


class Squaring(nn.Module):
    """Computes something else from right inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square()


class Doubling(Squaring):
    """Hands on what is right in another form."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def wrapped(rank: int, wrap: Callable[[nn.Module], nn.Module], change: Change = lambda m, x: x) -> Step:
    """What ``wrap`` makes of the stage of ``rank`` is watched in its place."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        stage = half(model)
        return train(watch(wrap(stage) if dist.get_rank() == rank else stage), microbatches, change)

    return step


def strangely_named(model: Any, microbatches: list[Any]) -> Any:
    stage, losses = train(own(model), microbatches)
    return {f"mine.{name}": p.grad for name, p in stage.named_parameters()}, losses


def build_tied() -> nn.Module:
    model = build_model()
    model[3][0].weight = model[0][0].weight
    return model


class Branches(nn.Module):
    """The third block works on what the first one gives, beside the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.top = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.left(x)
        return self.top(first) + self.right(first)


def doubled_branch(model: Any, microbatches: list[Any]) -> Any:
    """All three stages on one rank; the last one's gradients are doubled."""
    stages = [watch(stage) for stage in (model.left, model.right, model.top)]
    losses = backward(model, microbatches)
    for parameter in model.top.parameters():
        parameter.grad *= 2
    return stages, losses


def zero(*at: int) -> Step:
    return received(lambda m, x: x * 0 if m in at else x)


FAULTS = {
    "zero came in": Fault(zero(2), [("uninitialised", 1, 1, (2,))], ["wrong-message"]),
    "two zeros came in": Fault(zero(1, 2), [("uninitialised", 1, 1, (1, 2))], ["wrong-message"]),
    "zeros alone came in": Fault(zero(*EVERY), [("uninitialised", 1, 1, EVERY)], ["wrong-message"]),
    "sent in fp16": Fault(received(lambda m, x: x.half().float()), [("rounded", 1, 1, EVERY)], []),
    "infinite": Fault(received(lambda m, x: x / 0 if m == 1 else x), [("not-finite", 1, 1, (1,))], []),
    "scaled": Fault(received(lambda m, x: x * 1.5), [("altered", 1, 1, EVERY)], []),
    "shuffled": Fault(received(lambda m, x: x.flip(0) if m in (1, 2) else x), [("altered", 1, 1, (1, 2))], []),
    "noise added": Fault(received(little_noise), [("altered", 1, 1, (0, 1, 3))], []),
    "noise between": Fault(received(noise(1)), [("altered", 1, 1, (1,))], told=True),
    "noise twice": Fault(received(noise(1, 2)), [("altered", 1, 1, (1, 2))], told=True),
    "noise, and one too few": Fault(
        lambda model, microbatches: train(own(model), microbatches[:-1], noise(1, 2)), [("altered", 1, 1, (1, 2))]
    ),
    "another microbatch": Fault(replayed, [("mispaired", 1, 1, (2,))], ["wrong-message"], told=True),
    "data one late": Fault(inputs_of(0, 0, 1, 2), [("swapped-data", 0, 0, (1, 2, 3))]),
    "data late from the third on": Fault(inputs_of(0, 1, 1, 2), [("swapped-data", 0, 0, (2, 3))]),
    "data twice": Fault(inputs_of(0, 0, 2, 3), [("swapped-data", 0, 0, (1,))]),
    "computation, first": Fault(wrapped(0, Squaring), [("computation", 0, 0, EVERY)], told=True),
    "computation, last": Fault(wrapped(1, Squaring), [("computation", 1, 1, EVERY)], told=True),
    "no chain": Fault(doubled_branch, [("scale", 0, 2, ())], more={"reference": Branches, "ranks": 1}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_cause(whitebox: WhiteBox, name: str) -> None:
    fault = FAULTS[name]
    verdict = judged(whitebox, fault.step, **fault.more)
    assert named(verdict) == fault.causes, str(verdict)
    others = [one.kind for causes in verdict.alternatives for one in causes]
    assert fault.others in (None, others)
    assert not any(one.lines for one in verdict.causes if one.kind == "scale")
    if name == "no chain":
        assert verdict.causes[0].factor == pytest.approx(2.0)
    if name == "noise, and one too few":
        assert verdict.law("microbatches").outcome == "fail"
    if fault.told:
        golden(verdict.causes[0].detail, numbers=name == "noise twice")


@pytest.mark.sweep
@pytest.mark.parametrize("drawn", [(0, 0, 1, 2), (0, 1, 1, 2), (0, 0, 2, 3)], ids=str)
def test_a_microbatch_in_place_of_another(whitebox: WhiteBox, drawn: tuple[int, ...]) -> None:
    verdict = judged(whitebox, given(lambda all_: [all_[m] for m in drawn]))
    assert {cause.kind: len(cause.microbatches) for cause in verdict.causes} == {"dropped": 1, "doubled": 1}


@pytest.mark.sweep
def test_a_tied_parameter_that_was_not_summed(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, lambda model, microbatches: train(own(model), microbatches), reference=build_tied)
    assert verdict.outcome == "fail"
    assert {cause.kind for cause in verdict.causes} == {"tied-not-summed"}, str(verdict)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("step", "microbatches"),
    [(unwatched_before(noise(1)), {1}), (unwatched_before(noise(1, 2)), {None}), (strangely_named, set())],
    ids=["one of noise", "two of noise", "strange names"],
)
def test_what_tells_nothing_is_located_alone(whitebox: WhiteBox, step: Step, microbatches: set[int | None]) -> None:
    verdict = judged(whitebox, step)
    assert (verdict.outcome, verdict.causes) == ("fail", ())
    assert not any("wrong-message" in one.kinds for one in verdict.ruled_out)
    assert "dropped" not in verdict.details
    golden(verdict.undecided[0], numbers=False)
    golden(verdict.law("microbatches").note)
    assert {one.microbatch for one in verdict.mismatches if one.law == "boundaries"} == microbatches
    assert (verdict.law("microbatches").outcome == "pass") == bool(microbatches)


@pytest.mark.sweep
def test_an_output_in_another_form_is_not_blamed(whitebox: WhiteBox) -> None:
    def change(m: int, x: Tensor) -> Tensor:
        return (x / 2).detach() + torch.linspace(0, 1, x.numel()).view_as(x)

    verdict = judged(whitebox, wrapped(0, Doubling, change))
    assert verdict.outcome == "fail"
    assert all((cause.kind, cause.stage) != ("computation", 0) for cause in verdict.causes), str(verdict)
