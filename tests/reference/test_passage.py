"""What passes between modules is changed for a while, there and back, and nothing is left behind."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipeproof.reference.passage import Passage, passing

LAST = ("output 0 of 0", "output 1 of 0")


class Fork(nn.Module):
    """Two streams of one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3


class Join(nn.Module):
    def forward(self, streams: tuple[Tensor, Tensor]) -> Tensor:
        one, other = streams
        return one + 10 * other


MODEL = nn.Sequential(Fork(), Join())


def run(*passages: Passage, model: nn.Module = MODEL) -> tuple[float, float]:
    """The output, and the gradient of the input, which is 1."""
    x = torch.ones((), requires_grad=True)
    with passing(model, passages):
        y = model(x)
    y.backward()
    return y.item(), x.grad.item()  # type: ignore[union-attr]


def test_nothing_changes_without_a_passage_or_after_it() -> None:
    assert run() == (32.0, 32.0)
    assert run(Passage(LAST, there=lambda xs: xs[::-1])) != run()
    assert run() == (32.0, 32.0)


def test_what_goes_there_leaves_the_way_back_as_it_was() -> None:
    assert run(Passage(LAST, there=lambda xs: (xs[0], xs[0]))) == (22.0, 32.0)


def test_what_comes_back_leaves_the_way_there_as_it_was() -> None:
    assert run(Passage(LAST, back=lambda gs: gs[::-1])) == (32.0, 23.0)


@pytest.mark.parametrize(("place", "made"), [("output 1 of 0", 2.0), ("output 7 of 0", 32.0)])
def test_one_place_alone_is_changed(place: str, made: float) -> None:
    assert run(Passage([place], there=lambda xs: tuple(x * 0 for x in xs))) == (made, 32.0)


def test_several_passages_are_all_in_it() -> None:
    there, back = Passage(LAST, there=lambda xs: (xs[0], xs[0])), Passage(LAST, back=lambda gs: gs[::-1])
    assert run(there, back) == (22.0, 23.0)


class Twice(nn.Module):
    """What comes in is read twice, and goes on as it is."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        return (x * first if self.last else x + first), first


class Passing(nn.Module):
    """What the first module makes passes by others, which read it, to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Fork(), Twice(False), Twice(True)

    def forward(self, x: Tensor) -> Tensor:
        given: tuple[Tensor, Tensor] = self.first(x)
        for module in (self.second, self.third):
            given = module(*given)
        return given[0]


passed = partial(run, model=Passing())


def test_what_passes_into_some_modules_is_changed_for_these_alone() -> None:
    places, double = ("output 0 of second", "output 1 of first"), lambda xs: tuple(2 * x for x in xs)
    assert passed() == (15.0, 30.0)  # (2 x + 3 x) 3 x
    assert passed(Passage(places, there=double, into=["third"])) == (60.0, 30.0 * 2)
    assert passed(Passage(places[1:], there=double, into=["third"])) == (30.0, 6.0 * 5 + 15.0)
    assert passed(Passage(places[1:], back=double, into=["third"])) == (15.0, 15.0 + 2 * 15.0)
    assert passed(Passage(places, there=lambda xs: xs[::-1], into=["third"])) == (15.0, 5.0 * 5 + 3.0 * 3)
    assert passed(Passage(places, back=lambda gs: (gs[0] * 0, gs[1]), into=["third"])) == (15.0, 15.0)


def test_what_passed_into_some_modules_is_what_passes_into_later_ones() -> None:
    first = Passage(["output 1 of first"], there=lambda xs: (xs[0] + 1,), into=["second", "third"])
    then = Passage(["output 1 of first"], there=lambda xs: (xs[0] * 10,), into=["third"])
    assert passed(first, then)[0] == (2 + 4) * 40


def test_what_modules_are_given_whoever_made_it() -> None:
    assert run(Passage(into=("1",), back=lambda gradients: tuple(2 * one for one in gradients))) == (32.0, 64.0)
    assert run(Passage(into=("1",), there=lambda xs: tuple(2 * x for x in xs))) == (64.0, 32.0)
    assert run(Passage(into=("0",), back=lambda gradients: tuple(0 * one for one in gradients))) == (32.0, 0.0)
    assert run() == (32.0, 32.0)
