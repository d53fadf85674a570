"""A stage that gives what it is given, as with weights that begin at zero, beside a tensor that goes past it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.reason import Reason
from pipeproof.wings.composed.chain import place_of
from tests.support.pipeline_here import Job, Layer, Sent, checked, layers


class Beside(nn.Module):
    """The first of its inputs, and nothing of the others yet."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return x + self.more * sum(others, torch.ones(()))


class Astray(Job):
    """The gradient of what goes past a stage is sent to that stage."""

    def _received(self, k: int, made: list[list[Tensor]], sent: Sent) -> list[Tensor]:
        given = super()._received(k, made, sent)
        for of, number in [one for one in sent if one[0] < k - 1]:
            astray = [one for one in sent[of, number] if one[0] == k]
            sent[of, number] = [one for one in sent[of, number] if one[0] != k]
            sent[k - 1, number] += astray
        return given


def twice_the_first(x: Tensor, other: Tensor) -> Tensor:
    return 2 * torch.tanh(x) + other


def the_first(x: Tensor, other: Tensor) -> Tensor:
    return x * 1.0


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(x), torch.tanh(x)


def unlike(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(x), torch.sin(x)


def and_clone(x: Tensor) -> tuple[Tensor, Tensor]:
    """The second one's gradient comes to the first as well."""
    return x, x.clone()


def and_detached(x: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.tanh(x)
    return made, made.detach()


def three(x: Tensor) -> tuple[Tensor, ...]:
    return x, torch.tanh(2 * x), torch.sin(3 * x)


def past(first: int, then: Callable[..., Any] = twice_the_first, *, job: type[Job] = Job, **more: Any) -> Job:
    """The third stage is called on what the second made and what that was given, ``first`` that of a stage."""
    stages = [*layers(torch.tanh), Beside(), Layer(then, plain=True)]
    return job(stages, route={2: [(first, 0), (1 - first, 0)]}, **more)


Outputs = list[tuple[int, int]]
BOTH = [(0, 0), (1, 0)]
UNTRACED: dict[str, tuple[Callable[[], Job], Outputs]] = {
    **{
        f"stage {first} first, {then.__name__}, {'apart' if apart else 'together'}": (
            lambda first=first, then=then, apart=apart: past(first, then, apart=apart),
            BOTH,
        )
        for first in (0, 1)
        for then in (twice_the_first, torch.add)  # in a sum both get the same gradient
        for apart in ({}, {0: 1})
    },
    "two of one stage": (
        lambda: Job([*layers(two), Layer(twice_the_first, plain=True)], route={1: [(0, 0), (0, 1)]}),
        [(0, 0), (0, 1)],
    ),
    "two of one stage, exchanged": (
        lambda: Job([*layers(two), Layer(twice_the_first, plain=True)], route={1: [(0, 1), (0, 0)]}),
        [(0, 0), (0, 1)],
    ),
    **{
        f"output {number} of {both.__name__} goes past": (
            lambda number=number, both=both: Job(
                [*layers(both, torch.sin), Layer(twice_the_first)],
                route={1: [(0, 1 - number)], 2: [(1, 0), (0, number)]},
            ),
            [(0, 0), (0, 1)],
        )
        for number in (0, 1)
        for both in (two, and_clone)
    },
    "many": (
        lambda: Job(
            [*layers(torch.tanh), *(Beside() for _ in range(5)), Layer(twice_the_first)], route={6: [(5, 0), (0, 0)]}
        ),
        [(stage, 0) for stage in range(6)],
    ),
    "a gradient is altered on its way": (lambda: past(1, keep=0.5), BOTH),
}


@pytest.mark.parametrize("name", UNTRACED)
def test_equal_outputs_are_not_traced(name: str) -> None:
    """In another order the job may be right, and what flowed back may have been exchanged as well."""
    make, outputs = UNTRACED[name]
    verdict = checked(make())
    assert [law.name for law in verdict.laws if law.outcome in ("fail", "unknown")] == ["boundaries"], str(verdict)
    law = verdict.law("boundaries")
    assert (verdict.outcome, law.left_out) == ("unknown", tuple(map(place_of, outputs)))
    assert Reason.EQUAL_OUTPUTS in law.reasons


OTHERS: dict[str, tuple[Callable[[], Job], str]] = {
    "each of equal ones goes to one stage": (lambda: Job([*layers(torch.tanh), *(Beside() for _ in range(6))]), "pass"),
    "one goes to several stages that send zeros": (
        lambda: Job([*layers(unlike), Beside(), Beside(), Layer()], route={1: [(0, 0), (0, 1)], 2: [(1, 0), (0, 1)]}),
        "pass",
    ),
    # Other outputs are made of the one that zeros come back to, and their sums are rounded.
    "zeros beside what came through others": (
        lambda: Job([*layers(three), Beside(), Layer(torch.add)], route={1: [(0, 1), (0, 0)], 2: [(1, 0), (0, 2)]}),
        "pass",
    ),
    "one is put out twice beside equal ones": (
        lambda: Job(
            [*layers(unlike), Layer(lambda x: (x, x), plain=True), Beside(), Layer()],
            route={1: [(0, 1)], 2: [(0, 0), (1, 0), (1, 1)]},
        ),
        "unknown",
    ),
    "no gradient comes to one": (
        lambda: Job([*layers(two), Layer(the_first, plain=True), Layer(twice_the_first)], route={2: [(1, 0), (0, 0)]}),
        "unknown",
    ),
    "an equal one goes nowhere": (
        lambda: Job(
            layers(lambda x: (torch.tanh(x), torch.tanh(x).clone()), torch.tanh, twice_the_first),
            route={1: [(0, 0)], 2: [(1, 0), (0, 0)]},
        ),
        "unknown",
    ),
    "a detached one goes nowhere": (
        lambda: Job(layers(and_detached, torch.tanh, twice_the_first), route={1: [(0, 0)], 2: [(1, 0), (0, 0)]}),
        "unknown",
    ),
    "a detached one goes on, too": (
        lambda: Job(layers(and_detached, torch.tanh, twice_the_first), route={1: [(0, 1)], 2: [(1, 0), (0, 0)]}),
        "",
    ),
    "a gradient goes to another": (lambda: past(1, job=Astray), "unknown"),
    "the same one does": (lambda: past(1, torch.add, job=Astray), "unknown"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_goes_elsewhere_is_no_fault(name: str) -> None:
    make, outcome = OTHERS[name]
    verdict = checked(make())
    assert outcome in ("", verdict.outcome), str(verdict)
    assert verdict.causes == ()
