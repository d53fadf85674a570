"""A step that is held against itself: every link, broken alone, is named at its place; a right step is right."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import StageByStage, check_step
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.chained import LOSS, WIDTH, Faults, Step, data, named, stage_of, step
from tests.support.golden import golden
from tests.support.steps import backward

RANKS, COUNT = 3, 4


def checked(world: World, faults: Faults | None = None, **options: Any) -> Verdict:
    verdicts = world.run(partial(step, **options), COUNT, faults or Faults(), ranks=RANKS)
    assert len({verdict.details for verdict in verdicts}) == 1, "all ranks have one verdict"
    return verdicts[0]


@pytest.mark.parametrize("kind", ["simulated", "world"])
def test_a_right_step_agrees_to_the_bit(kind: str, request: pytest.FixtureRequest) -> None:
    verdict = checked(request.getfixturevalue(kind), clips=True)
    assert verdict.outcome == "pass", str(verdict)
    checks = {law.name: (law.checked, law.exact) for law in verdict.laws if law.checked}
    assert checks["gradient"] == checks["presence"] == (12, 12)
    assert checks["boundaries"][0] == checks["boundaries"][1] >= 4 * COUNT * (RANKS - 1)
    assert checks["loss"] == (COUNT, COUNT)
    assert checks["updated-parameters"][0] == 12


def at(microbatch: int, change: Callable[[Tensor], Tensor]) -> Callable[[Step, Tensor], Tensor]:
    return lambda here, value: change(value) if here.microbatch == microbatch else value


def double(value: Tensor) -> Tensor:
    return value * 2


def moved(here: Step, stage: nn.Module) -> None:
    for parameter in stage.parameters():
        parameter.data += 1e-3


def scaled(here: Step, stage: nn.Module) -> None:
    for parameter in stage.parameters():
        parameter.data *= 1.01


def doubled_gradient(here: Step, stage: nn.Module) -> None:
    gradient = next(stage.parameters()).grad
    gradient.mul_(2)


def again(here: Step, stage: nn.Module) -> None:
    """Microbatch 2 goes through the stage and back once more."""
    stage(here.inputs[2].detach()).sum().backward()


def the_first(here: Step, value: Tensor) -> Tensor:
    return here.inputs[0].detach().clone() if here.microbatch == 1 else value


@dataclass(frozen=True)
class Broken:
    """The laws that fail, the kinds that causes name, and of the first cause its rank; of the first mismatch more."""

    faults: Faults
    laws: set[str]
    kinds: set[str]
    rank: int | None = 1
    first: dict[str, Any] = field(default_factory=dict)
    clips: bool = False
    microbatches: tuple[int, ...] | None = None  # of the first cause


BOUNDARIES = {"boundaries"}
BROKEN = {
    "a message doubled": Broken(Faults(received=at(2, double)), BOUNDARIES, {"altered"}),
    "a message off by a millionth": Broken(Faults(received=lambda _, x: x * (1 + 1e-6)), BOUNDARIES, {"altered"}),
    "a message cast": Broken(Faults(received=lambda _, x: x.bfloat16().float()), BOUNDARIES, {"rounded"}),
    "another microbatch's message": Broken(
        Faults(received=the_first),
        {"boundaries", "microbatches"},
        {"mispaired", "wrong-message"},
        first={"stage": 1},
        microbatches=(1,),
    ),
    "a gradient doubled on its way": Broken(Faults(flow=lambda _, g: g * 2), BOUNDARIES, {"scale"}),
    "an input gradient changed when sent": Broken(Faults(2, handed_on=at(1, double)), BOUNDARIES, {"scale"}),
    "an output changed when sent": Broken(Faults(made=at(1, lambda y: y + 1)), BOUNDARIES, {"altered"}, 2),
    "another target": Broken(
        Faults(2, target=at(1, torch.zeros_like)),
        {"boundaries", "loss"},
        {"computation"},
        2,
        {"law": "boundaries", "stage": 2, "microbatch": 1, "action": "2B1"},
    ),
    "a backward left out": Broken(Faults(skip=[2]), {"microbatches"}, {"dropped"}),
    "a microbatch run once more": Broken(
        Faults(after=again),
        {"microbatches", "boundaries"},
        {"doubled"},
        first={"law": "microbatches", "rank": 1, "observed": (0, 1, 2, 3, 2)},
    ),
    "a gradient doubled": Broken(Faults(after=doubled_gradient), {"gradient"}, {"scale"}),
    "a loss divided twice": Broken(Faults(2, loss=lambda _, loss: loss / COUNT), {"gradient"}, {"scale"}, None),
    "another norm": Broken(Faults(norm=lambda _, norm: norm * 2), {"grad-norm"}, {"report"}),
    "weights changed after forwards": Broken(Faults(after=scaled), {"boundaries", "gradient"}, {"computation"}),
    "weights changed after the optimizer": Broken(
        Faults(updated=moved), {"updated-parameters"}, {"update"}, first={"stage": 1}, clips=True
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_link_is_named_at_its_place(name: str, simulated: World) -> None:
    way = BROKEN[name]
    verdict = checked(simulated, way.faults, clips=way.clips)
    assert {law.name for law in verdict.laws if law.outcome == "fail"} == way.laws, str(verdict)
    causes = [verdict.causes[0], *(one for some in verdict.alternatives for one in some)]
    assert {cause.kind for cause in causes} >= way.kinds, str(verdict)
    assert causes[0].rank == way.rank, str(verdict)
    assert way.microbatches in (None, causes[0].microbatches), str(verdict)
    assert {name: getattr(verdict.mismatches[0], name) for name in way.first} == way.first, str(verdict)


def test_an_update_is_compared_where_it_is_known(simulated: World) -> None:
    verdict = checked(simulated, Faults(updated=moved))
    assert verdict.outcome == "pass"
    golden(verdict.law("updated-parameters").note)


@pytest.mark.parametrize("told", [(), (1,)])
def test_what_is_not_compared_is_no_pass(told: tuple[int, ...], simulated: World) -> None:
    verdicts = simulated.run(silent, told, ranks=2)
    assert {verdict.outcome for verdict in verdicts} == {"unknown"}
    assert {verdict.law("comparable").reasons for verdict in verdicts} == {(Reason.USE,)}
    golden(verdicts[0].law("comparable").note)


def silent(context: RankContext, told: tuple[int, ...]) -> Verdict:
    with check_step(stage_of(context.rank), data(2), against=StageByStage(LOSS), rename=named, timeout_s=5) as check:
        if context.rank in told:
            check.gradients()
    return check.verdict


class Odd(nn.Module):
    """A layer of whose calls not all are alike: ``changed`` is given what it makes, and how many calls there were."""

    def __init__(self, changed: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.linear, self.calls, self.changed = nn.Linear(WIDTH, WIDTH), list[None](), changed

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(None)
        return self.changed(self.linear(x), len(self.calls))


def struck(out: Tensor, calls: int) -> Tensor:
    """One bit of one output falls over, as by a fault of the hardware: once, and never again."""
    if calls == 2:
        with torch.no_grad():
            out.view(torch.int32)[1, 3] ^= 1 << 20
    return out


def moody(out: Tensor, calls: int) -> Tensor:
    return out * calls


def steady(out: Tensor, calls: int) -> Tensor:
    return out


@pytest.mark.parametrize(
    ("changed", "left", "outcome", "cause"),
    [
        (struck, False, "fail", ("computation", (1,))),
        (moody, False, "unknown", None),
        (steady, True, "fail", ("stale-gradient", ())),
    ],
)
def test_a_stage_that_gives_something_else_once(
    changed: Callable[[Tensor, int], Tensor], left: bool, outcome: str, cause: tuple[str, tuple[int, ...]] | None
) -> None:
    """Or that has a gradient which an earlier step ``left``."""
    module, microbatches = Odd(changed), data(3)
    for parameter in module.parameters() if left else ():
        parameter.grad = torch.ones_like(parameter)
    with check_step(module, microbatches, against=StageByStage(LOSS), timeout_s=5) as check:
        losses = backward(module, microbatches, by=LOSS)
        check.gradients()
        check.report(losses=losses)
    assert check.verdict.outcome == outcome, str(check.verdict)
    assert [(one.kind, one.microbatches) for one in check.verdict.causes[:1]] == ([] if cause is None else [cause])
    assert check.verdict.law("boundaries").reasons == ((Reason.RERUN,) if cause is None else ())
