"""A stage that gives what it is given, as with weights that begin at zero, beside a tensor that goes past it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.wings.composed.chain import place_of
from tests.support.pipeline_here import Job, Layer, Sent, checked, layers


class Zeroed(nn.Module):
    """Adds nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.more


def twice_the_first(x: Tensor, other: Tensor) -> Tensor:
    return 2 * torch.tanh(x) + other


def verdict_of(first: int, *, equal: bool = False, job: type[Job] = Job, **more: float) -> Verdict:
    """Of a step whose third stage is called on what the second made and what it was given, ``first`` that of a stage.

    ``equal``: both get the same gradient.
    """
    last = Layer(torch.add if equal else twice_the_first)
    last.layer = nn.Identity()  # type: ignore[assignment]
    stages = [*layers(torch.tanh), Zeroed(), last]
    return checked(job(stages, route={2: [(first, 0), (1 - first, 0)]}, **more))  # type: ignore[arg-type]


def assert_untraced(verdict: Verdict, *outputs: tuple[int, int]) -> None:
    assert [law.name for law in verdict.laws if law.outcome in ("fail", "unknown")] == ["boundaries"], str(verdict)
    assert verdict.verdict == "unknown"
    assert Reason.EQUAL_OUTPUTS in verdict.law("boundaries").reasons
    assert verdict.law("boundaries").left_out == tuple(map(place_of, outputs))


@pytest.mark.parametrize("apart", [{}, {0: 1}], ids=["together", "apart"])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_where_equal_outputs_come_from_is_not_known(first: int, equal: bool, apart: dict[int, int]) -> None:
    verdict = verdict_of(first, equal=equal, apart=apart)  # type: ignore[arg-type]
    assert_untraced(verdict, (0, 0), (1, 0))


@pytest.mark.parametrize("inputs", [[(0, 0), (0, 1)], [(0, 1), (0, 0)]])
def test_which_of_the_equal_outputs_of_one_stage_came_is_not_known(inputs: list[tuple[int, int]]) -> None:
    """In another order the job may be right, and what flowed back may have been exchanged as well."""
    stages = [*layers(lambda x: (torch.tanh(x), torch.tanh(x))), Layer(twice_the_first)]
    stages[1].layer = nn.Identity()  # type: ignore[union-attr]
    assert_untraced(checked(Job(stages, route={1: inputs})), (0, 0), (0, 1))


def copied(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of these the second one's gradient comes to the first as well."""
    return x, x.clone()


@pytest.mark.parametrize("past", [0, 1])
@pytest.mark.parametrize("both", [lambda x: (torch.tanh(x), torch.tanh(x)), copied], ids=["two", "a copy"])
def test_one_of_two_equal_outputs_may_go_past_the_next_stage(past: int, both: Callable[..., Any]) -> None:
    stages = [*layers(both, torch.sin), Layer(twice_the_first)]
    verdict = checked(Job(stages, route={1: [(0, 1 - past)], 2: [(1, 0), (0, past)]}))
    assert_untraced(verdict, (0, 0), (0, 1))


class Astray(Job):
    """The gradient of what goes past a stage is sent to that stage."""

    def _received(self, k: int, made: list[list[Tensor]], sent: Sent) -> list[Tensor]:
        given = super()._received(k, made, sent)
        for of, number in [one for one in sent if one[0] < k - 1]:
            astray = [one for one in sent[of, number] if one[0] == k]
            sent[of, number] = [one for one in sent[of, number] if one[0] != k]
            sent[k - 1, number] += astray
        return given


@pytest.mark.parametrize("equal", [False, True])
def test_a_gradient_that_goes_to_another_of_equal_outputs_does_not_pass(equal: bool) -> None:
    verdict = verdict_of(1, equal=equal, job=Astray)
    assert verdict.verdict == "unknown", str(verdict)
    assert not verdict.cause


def test_of_many_equal_outputs_it_is_not_known_either() -> None:
    stages = [*layers(torch.tanh), *(Zeroed() for _ in range(5)), Layer(twice_the_first)]
    verdict = checked(Job(stages, route={6: [(5, 0), (0, 0)]}))
    assert_untraced(verdict, *((stage, 0) for stage in range(6)))


def test_equal_outputs_that_each_go_to_one_stage_are_told_apart() -> None:
    stages = [*layers(torch.tanh), *(Zeroed() for _ in range(6))]
    assert checked(Job(stages)).verdict == "pass"


def test_a_gradient_that_is_altered_on_its_way_to_one_of_equal_outputs_does_not_pass() -> None:
    assert_untraced(verdict_of(1, keep=0.5), (0, 0), (1, 0))


class Beside(nn.Module):
    """The first of its inputs, and nothing of the others yet."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return x + self.more * sum(others)


def test_an_output_may_go_to_several_stages_that_all_send_back_zeros() -> None:
    stages = [*layers(lambda x: (torch.tanh(x), torch.sin(x))), Beside(), Beside(), Layer()]
    verdict = checked(Job(stages, route={1: [(0, 0), (0, 1)], 2: [(1, 0), (0, 1)]}))
    assert verdict.verdict == "pass", str(verdict)


def test_a_tensor_that_is_put_out_twice_beside_equal_ones_is_not_traced() -> None:
    stages = [*layers(lambda x: (torch.tanh(x), torch.sin(x))), Layer(lambda x: (x, x)), Beside(), Layer()]
    stages[1].layer = nn.Identity()  # type: ignore[union-attr]
    verdict = checked(Job(stages, route={1: [(0, 1)], 2: [(0, 0), (1, 0), (1, 1)]}))
    assert verdict.verdict == "unknown", str(verdict)
    assert Reason.EQUAL_OUTPUTS in verdict.law("boundaries").reasons


def test_zeros_that_come_back_are_zeros_beside_what_came_through_other_outputs() -> None:
    """Those other outputs are made of the one that zeros come back to, and their sums are rounded."""
    stages = [*layers(lambda x: (x, torch.tanh(2 * x), torch.sin(3 * x))), Beside(), Layer(torch.add)]
    verdict = checked(Job(stages, route={1: [(0, 1), (0, 0)], 2: [(1, 0), (0, 2)]}))
    assert verdict.verdict == "pass", str(verdict)


def the_first(x: Tensor, other: Tensor) -> Tensor:
    return x * 1.0


def test_an_output_that_no_gradient_comes_to_fits_an_input_that_sends_none() -> None:
    stages = [*layers(lambda x: (torch.tanh(x), torch.tanh(x))), Layer(the_first), Layer(twice_the_first)]
    stages[1].layer = nn.Identity()  # type: ignore[union-attr]
    verdict = checked(Job(stages, route={2: [(1, 0), (0, 0)]}))
    assert verdict.verdict == "unknown", str(verdict)


def and_clone(x: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.tanh(x)
    return made, made.clone()


def and_detached(x: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.tanh(x)
    return made, made.detach()


@pytest.mark.parametrize("twice", [and_clone, and_detached])
def test_an_equal_output_that_goes_nowhere_is_open_and_no_fault(twice: Callable[[Tensor], Any]) -> None:
    stages = layers(twice, torch.tanh, twice_the_first)
    verdict = checked(Job(stages, route={1: [(0, 0)], 2: [(1, 0), (0, 0)]}))
    assert (verdict.verdict, verdict.cause) == ("unknown", ()), str(verdict)


def test_what_was_put_out_detached_too_did_not_lose_its_gradient_on_the_way() -> None:
    stages = layers(and_detached, torch.tanh, twice_the_first)
    assert not checked(Job(stages, route={1: [(0, 1)], 2: [(1, 0), (0, 0)]})).cause
