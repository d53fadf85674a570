"""A step that draws random numbers from wherever goes on with the bits that it would have."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pipeproof import StageByStage, check_step
from pipeproof.core.contract import Contract, ContractError
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.steps import backward

LOSS = nn.functional.mse_loss
WIDTH, ROWS, COUNT = 4, 3, 3
Mask = Callable[[], Tensor]


class Tracker:
    """Keeps a state of torch's random numbers by name, as Megatron's does."""

    def __init__(self) -> None:
        self.states = {"mine": torch.Generator().manual_seed(5).get_state()}

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = states

    @contextmanager
    def fork(self) -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states["mine"])
        try:
            yield
        finally:
            self.states["mine"] = torch.get_rng_state()
            torch.set_rng_state(outer)


class Masked(nn.Module):
    """A layer that is multiplied by what it draws."""

    def __init__(self, draw: Callable[["Masked"], Any], **own: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.draw = draw
        for name, one in own.items():
            setattr(self, name, one)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) * self.draw(self))


def of_tracker(tracker: Tracker) -> Tensor:
    with tracker.fork():
        return torch.rand(WIDTH)


def masked(kind: str) -> tuple[Masked, Any]:
    """A stage, and what it draws from, where that is no part of it."""
    generator = torch.Generator().manual_seed(5)
    arrays, numbers, tracker = numpy.random.default_rng(5), random.Random(5), Tracker()
    stages: dict[str, tuple[Masked, Any]] = {
        "its own of torch": (Masked(lambda s: torch.rand(WIDTH, generator=s.own), own=generator), None),
        "its own of numpy": (Masked(lambda s: torch.from_numpy(s.own.random(WIDTH)).float(), own=arrays), None),
        "its own of Python": (Masked(lambda s: s.own.random(), own=numbers), None),
        "its own tracker": (Masked(lambda s: of_tracker(s.own), own=tracker), None),
        "of torch": (Masked(lambda s: torch.rand(WIDTH, generator=generator)), generator),
        "of numpy": (Masked(lambda s: torch.from_numpy(arrays.random(WIDTH)).float()), arrays),
        "of Python": (Masked(lambda s: numbers.random()), numbers),
        "tracker": (Masked(lambda s: of_tracker(tracker)), tracker),
        "of a loss": (Masked(lambda s: 1.0), arrays),
    }
    return stages[kind]


KINDS = ("its own of torch", "its own of numpy", "its own of Python", "its own tracker")
OTHERS = {
    "of torch": "stage 0 draws from a Generator of torch that is not part of it",
    "of numpy": "stage 0 draws from a Generator of numpy that is not part of it",
    "of Python": "stage 0 draws from a Random of random that is not part of it",
    "tracker": "stage 0 draws from random numbers whose state is kept elsewhere",
    "of a loss": "the loss draws from a Generator of numpy that is not part of it",
}


def noisy(output: Tensor, target: Tensor, *, generator: numpy.random.Generator) -> Tensor:
    return LOSS(output * generator.random(), target)


def job(context: RankContext, kind: str, checked: bool, told: bool) -> tuple[list[Verdict], list[float]]:
    """Two steps, and the weights after them."""
    torch.manual_seed(0)
    stage, drawn = masked(kind)
    loss_fn = partial(noisy, generator=drawn) if kind == "of a loss" else LOSS
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(COUNT)]
    by = StageByStage(loss_fn, optimizer=optimizer, generators=[drawn] if told else [])
    verdicts = []
    for _ in range(2):
        if checked:
            with check_step({0: stage}, data, against=by) as check:
                losses = backward(stage, data, by=loss_fn)
                check.gradients()
                optimizer.step()
                check.report(losses=losses)
            verdicts.append(check.verdict)
        else:
            backward(stage, data, by=loss_fn)
            optimizer.step()
        optimizer.zero_grad()
    return verdicts, [one.double().sum().item() for one in stage.parameters()]


DRAWS = [
    *((kind, False, "") for kind in KINDS),
    *((kind, True, "") for kind in OTHERS),
    *((kind, False, why) for kind, why in OTHERS.items()),
]


@pytest.mark.parametrize(("kind", "told", "why"), DRAWS)
def test_what_a_stage_draws_it_draws_again(kind: str, told: bool, why: str, here: World) -> None:
    """Where it is known from what; and the job goes on with its bits in any case."""
    ((verdicts, weights),) = here.run(job, kind, True, told, ranks=1)
    for verdict in verdicts:
        assert verdict.outcome == ("unknown" if why else "pass"), str(verdict)
        assert f"{why}: pass " in verdict.details if why else verdict.tier == "bitwise"
    assert weights == here.run(job, kind, False, told, ranks=1)[0][1]


@pytest.mark.parametrize("given", [3, [torch.rand], [None]])
def test_generators_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(
        WhiteBoxError, match=r"generators is .*: expected a list of generators of torch, Python or numpy"
    ):
        StageByStage(LOSS, generators=given).check()


BY_TWO = Contract(loss_divisor=2)


def mine(model: None, microbatches: list[Any]) -> None:
    """A step that nobody calls."""


@pytest.mark.parametrize(
    ("by", "beside", "said"),
    [
        ({"loss_fn": LOSS}, {"loss_fn": LOSS}, "loss_fn is given twice, also to StageByStage: give it once"),
        ({"contract": BY_TWO}, {"contract": BY_TWO}, "contract is given twice, also to StageByStage: give it once"),
        (
            {},
            {"contract": Contract(operations=["train"])},
            "leave it out, or let reference= be a function that builds the whole model",
        ),
        ({}, {"optimizer": torch.optim.SGD}, "optimizer= with a StageByStage, which holds a step up to its gradients"),
        ({}, {"contract": Contract(outputs=dict)}, "outputs of the contract is not read where a step is held against"),
        ({"contract": Contract(max_norm=1.0)}, {}, "max_norm of the contract is not read where a step is held against"),
        ({"every": 2}, {}, "every= of StageByStage is for a running job"),
        ({"generators": [random.Random(0)]}, {}, "generators= of StageByStage is for a running job"),
        ({"build": 3}, {}, "build is a int"),
        ({}, {"microbatches": [torch.zeros(1)]}, "microbatch 0 is a Tensor: expected a pair of inputs and target"),
    ],
)
def test_what_is_of_other_checks_is_refused(by: dict[str, Any], beside: dict[str, Any], said: str) -> None:
    given = {"microbatches": [(torch.zeros(1), torch.zeros(1))], "ranks": 2, **beside}
    with pytest.raises((WhiteBoxError, ContractError), match=said):
        WhiteBox(World()).validate(mine, reference=StageByStage(**by), **given)
