"""A step that is held against itself: every link, broken alone, is named at its place; a right step is right."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import Composed, check_step
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.chained import LOSS, WIDTH, Faults, Step, data, named, stage_of, step
from tests.support.golden import golden

RANKS, COUNT = 3, 4


def checked(world: World, faults: Faults | None = None, **options: Any) -> Verdict:
    verdicts = world.run(partial(step, **options), COUNT, faults or Faults(), ranks=RANKS)
    assert len({verdict.details for verdict in verdicts}) == 1, "all ranks have one verdict"
    found: Verdict = verdicts[0]
    return found


@pytest.mark.parametrize("kind", ["simulated", "world"])
def test_a_right_step_agrees_with_itself_to_the_bit(kind: str, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(kind)
    verdict = checked(world, clips=True)
    assert verdict.verdict == "pass", str(verdict)
    checks = {law.name: (law.checked, law.exact) for law in verdict.laws if law.checked}
    assert checks["gradient"] == checks["presence"] == (12, 12)
    assert checks["boundaries"][0] == checks["boundaries"][1] >= 4 * COUNT * (RANKS - 1)
    assert checks["loss"] == (COUNT, COUNT)
    assert checks["updated-parameters"][0] == 12


def at(microbatch: int, change: Callable[[Tensor], Tensor]) -> Callable[[Step, Tensor], Tensor]:
    return lambda here, value: change(value) if here.microbatch == microbatch else value


def double(value: Tensor) -> Tensor:
    return value * 2


def scaled(stage: nn.Module) -> None:
    for parameter in stage.parameters():
        parameter.data *= 1.01


def first_gradient(stage: nn.Module) -> Tensor:
    gradient = next(stage.parameters()).grad
    assert gradient is not None
    return gradient


# By name: the fault, the laws that fail, and of the first cause its kind, rank and stage.
BROKEN: dict[str, tuple[Faults, set[str], str, int | None]] = {
    "a message doubled": (Faults(received=at(2, double)), {"boundaries"}, "altered", 1),
    "a message off by a millionth": (
        Faults(received=lambda here, x: x * (1 + 1e-6)),
        {"boundaries"},
        "altered",
        1,
    ),
    "a message cast": (Faults(received=lambda here, x: x.bfloat16().float()), {"boundaries"}, "rounded", 1),
    "a gradient doubled on its way": (Faults(flow=lambda here, g: g * 2), {"boundaries"}, "scale", 1),
    "an input gradient changed before it is sent": (Faults(2, handed_on=at(1, double)), {"boundaries"}, "scale", 1),
    "an output changed before it is sent": (Faults(made=at(1, lambda y: y + 1)), {"boundaries"}, "altered", 2),
    "a backward left out": (Faults(skip=[2]), {"microbatches"}, "dropped", 1),
    "a gradient doubled": (
        Faults(after=lambda here, stage: first_gradient(stage).mul_(2)),
        {"gradient"},
        "scale",
        1,
    ),
    "a loss divided twice": (
        Faults(2, loss=lambda here, loss: loss / COUNT),
        {"gradient"},
        "scale",
        None,
    ),
    "a norm that is another": (Faults(norm=lambda here, norm: norm * 2), {"grad-norm"}, "report", 1),
    "weights changed after the forwards": (
        Faults(after=lambda here, stage: scaled(stage)),
        {"boundaries", "gradient"},
        "computation",
        1,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_link_is_named_at_its_place(name: str, simulated: World) -> None:
    faults, laws, kind, rank = BROKEN[name]
    verdict = checked(simulated, faults)
    assert verdict.verdict == "fail", str(verdict)
    assert {law.name for law in verdict.laws if law.outcome == "fail"} == laws, str(verdict)
    first = verdict.cause[0]
    assert (first.kind, first.rank) == (kind, rank), str(verdict)


def other_target(here: Step, target: Tensor) -> Tensor:
    return torch.zeros_like(target) if here.microbatch == 1 else target


def test_a_wrong_target_breaks_the_link_of_the_loss(simulated: World) -> None:
    verdict = checked(simulated, Faults(2, target=other_target))
    first = verdict.mismatches[0]
    assert (first.law, first.stage, first.microbatch, first.action) == ("boundaries", 2, 1, "2B1"), str(verdict)
    assert verdict.law("loss").outcome == "fail"


def another_microbatch_s(here: Step, value: Tensor) -> Tensor:
    return here.inputs[0].detach().clone() if here.microbatch == 1 else value


def test_a_stage_that_takes_another_microbatch_s_input_is_named(simulated: World) -> None:
    verdict = checked(simulated, Faults(received=another_microbatch_s))
    assert verdict.verdict == "fail"
    told = [verdict.cause[0], *(one for some in verdict.alternatives for one in some)]
    assert {cause.kind for cause in told} >= {"mispaired", "wrong-message"}, str(verdict)
    assert (told[0].rank, told[0].stage, told[0].microbatches) == (1, 1, (1,))


def undone(here: Step, stage: nn.Module) -> None:
    for parameter in stage.parameters():
        parameter.data += 1e-3


def test_what_the_optimizer_does_follows_from_the_gradients(simulated: World) -> None:
    verdict = checked(simulated, Faults(updated=undone), clips=True)
    assert {law.name for law in verdict.laws if law.outcome == "fail"} == {"updated-parameters"}, str(verdict)
    assert (verdict.cause[0].rank, verdict.cause[0].stage) == (1, 1)
    without = checked(simulated, Faults(updated=undone))
    assert without.verdict == "pass"
    golden(without.law("updated-parameters").note)


def again(here: Step, stage: nn.Module) -> None:
    """Microbatch 2 goes through the stage and back once more."""
    stage(here.inputs[2].detach()).sum().backward()


def test_a_microbatch_that_is_run_once_more_is_counted(simulated: World) -> None:
    verdict = checked(simulated, Faults(after=again))
    counted = [one for one in verdict.mismatches if one.law == "microbatches"]
    assert [(one.rank, one.found) for one in counted[:1]] == [(1, (0, 1, 2, 3, 2))], str(verdict)
    assert verdict.cause[0].stage == 1


@pytest.mark.parametrize("told", [(), (1,)])
def test_what_nobody_compared_is_no_pass(told: tuple[int, ...], simulated: World) -> None:
    verdicts = simulated.run(silent, told, ranks=2)
    assert {verdict.verdict for verdict in verdicts} == {"unknown"}
    assert {verdict.law("comparable").reasons for verdict in verdicts} == {(Reason.USE,)}
    golden(verdicts[0].law("comparable").note)


def silent(context: RankContext, told: tuple[int, ...]) -> Verdict:
    with check_step(stage_of(context.rank), data(2), against=Composed(LOSS), rename=named, timeout_s=5) as check:
        if context.rank in told:
            check.gradients()
    return check.verdict


class Struck(nn.Module):
    """One bit of one output falls over, as by a fault of the hardware: once, and never again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), list[None]()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.calls.append(None)
        if len(self.calls) == 2:
            with torch.no_grad():
                out.view(torch.int32)[1, 3] ^= 1 << 20
        return out


def test_a_computation_that_does_not_come_again_is_told_from_a_wrong_one(simulated: World) -> None:
    (verdict,) = simulated.run(alone, Struck, ranks=1)
    first = verdict.cause[0]
    assert (verdict.verdict, first.kind, first.microbatches) == ("fail", "computation", (1,)), str(verdict)


class Moody(nn.Module):
    """Gives something else each time that it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), list[None]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(None)
        out: Tensor = self.linear(x) * len(self.calls)
        return out


def alone(context: RankContext, make: Callable[[], nn.Module]) -> Verdict:
    """A step of one stage."""
    stage, microbatches = make(), data(3)
    with check_step(stage, microbatches, against=Composed(LOSS), timeout_s=5) as check:
        losses = []
        for inputs, target in microbatches:
            loss = LOSS(stage(inputs), target)
            losses.append(loss.item())
            (loss / 3).backward()
        check.gradients()
        check.report(losses=losses)
    return check.verdict


def test_a_stage_that_is_no_function_of_its_inputs_is_not_judged(simulated: World) -> None:
    (verdict,) = simulated.run(alone, Moody, ranks=1)
    assert verdict.verdict == "unknown", str(verdict)
    assert verdict.law("boundaries").reasons == (Reason.RERUN,)


def left(here: nn.Module) -> nn.Module:
    for parameter in here.parameters():
        parameter.grad = torch.ones_like(parameter)
    return here


def test_what_was_there_before_the_step_is_no_part_of_it(simulated: World) -> None:
    (verdict,) = simulated.run(alone, lambda: left(nn.Linear(WIDTH, WIDTH)), ranks=1)
    assert (verdict.verdict, verdict.cause[0].kind) == ("fail", "stale-gradient"), str(verdict)
