"""A loss scale that gradients are divided by in the end is no fault: one beside it is named as without it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeproof.cases.specimens import PLUGINS, SPECIMENS
from pipeproof.cases.trial import smallest_of
from pipeproof.cases.validator import validate
from pipeproof.diagnosis.unscaled import unscaled
from pipeproof.observers.recording import FLOWED, MADE, Addition, Point, Recording
from pipeproof.pipeline.action import Action, Kind
from pipeproof.worlds.world import World

FILE = Path(__file__).parent / "scaled_specimens.py"
MIXED = ["stage-negated", "microbatch-dropped", "gradients-all-zero", "activation-repeated"]


@pytest.fixture
def planted() -> Iterator[None]:
    PLUGINS.load(FILE)
    yield
    PLUGINS.unload(FILE)


@pytest.mark.parametrize("name", MIXED)
def test_a_fault_beside_a_loss_scale_is_named_as_without_it(planted: None, world: World, name: str) -> None:
    case = smallest_of(SPECIMENS[name])
    plain, mixed = (validate(replace(case, specimen=one), world) for one in (name, f"scaled-{name}"))
    assert plain.cause, str(plain)
    assert mixed.cause == plain.cause, str(mixed)


def test_losses_that_are_scaled_more_than_gradients_are_divided_by_are_said_to_be(planted: None, world: World) -> None:
    case = replace(smallest_of(SPECIMENS["loss-undivided"]), specimen="scaled-loss-undivided")
    (cause,) = validate(case, world).cause
    assert (cause.kind, cause.factor) == ("scale", 2048.0)


FLOW, GRADIENT = torch.linspace(-1, 1, 8), torch.linspace(1, 2, 8)
POINT, OUTPUT = Point(1, 0, FLOWED), Point(1, 0, MADE)
NAN = torch.full((8,), torch.nan)


@pytest.mark.parametrize(
    ("flow", "summed", "given", "scale"),
    [
        (64 * FLOW, 64 * GRADIENT, GRADIENT, 64.0),
        (64 * FLOW, GRADIENT, GRADIENT, 64.0),  # divided before copies are summed
        (64 * FLOW, 64 * GRADIENT, -GRADIENT, 64.0),
        (64 * FLOW, 64 * GRADIENT, GRADIENT + 0.1 * FLOW, 64.0),  # something was added besides
        (64 * FLOW, 64 * GRADIENT, NAN, 64.0),  # which tells nothing
        (64 * FLOW, 64 * GRADIENT, None, 64.0),
        (64 * FLOW, 64 * GRADIENT, 64 * GRADIENT, 1.0),  # nobody divides
        (64 * FLOW, 64 * GRADIENT, 2 * GRADIENT, 1.0),  # or by something else
        (FLOW, 64 * GRADIENT, GRADIENT, 1.0),
        (FLOW.flip(0) + 1, 64 * GRADIENT, GRADIENT, 1.0),
    ],
)
def test_it_is_divided_out_where_gradients_are_divided_by_it(
    flow: Tensor, summed: Tensor, given: Tensor | None, scale: float
) -> None:
    added = Addition(Action(1, Kind.BACKWARD, 0), {"w": None}, {"w": 64 * GRADIENT})
    seen = Recording({POINT: [flow], OUTPUT: [flow]}, additions={1: [added]}, summed={(1, "w"): summed})
    found = unscaled({0: seen}, {POINT: [FLOW], OUTPUT: [FLOW]}, {(1, "w"): given})[0]
    assert torch.equal(_only(found.tensors[POINT]), flow / scale)
    assert torch.equal(_only(found.tensors[OUTPUT]), flow), "no gradient"
    assert torch.equal(_only([found.additions[1][0].after["w"]]), 64 * GRADIENT / scale)
    late = summed is not GRADIENT
    assert torch.equal(_only([found.summed[1, "w"]]), summed / (scale if late else 1.0))


def _only(tensors: object) -> Tensor:
    (one,) = tensors  # type: ignore[misc]
    assert isinstance(one, Tensor)
    return one
