"""What passes between modules is changed for a while, there and back, and nothing is left behind."""

import torch
from torch import Tensor, nn

from pipeproof.reference.passage import Passage, passing

LAST = {"output 0 of 0", "output 1 of 0"}


class Fork(nn.Module):
    """Two streams of one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3


class Join(nn.Module):
    def forward(self, streams: tuple[Tensor, Tensor]) -> Tensor:
        one, other = streams
        return one + 10 * other


MODEL = nn.Sequential(Fork(), Join())


def run(*passages: Passage) -> tuple[float, float]:
    """The output, and the gradient of the input, which is 1."""
    x = torch.ones((), requires_grad=True)
    with passing(MODEL, passages):
        y = MODEL(x)
    y.backward()
    assert x.grad is not None
    return y.item(), x.grad.item()


def test_nothing_changes_without_a_passage_or_after_it() -> None:
    assert run() == (32.0, 32.0)
    assert run(Passage(LAST, there=lambda xs: xs[::-1])) != run()
    assert run() == (32.0, 32.0)


def test_what_goes_there_leaves_the_way_back_as_it_was() -> None:
    assert run(Passage(LAST, there=lambda xs: (xs[0], xs[0]))) == (22.0, 32.0)


def test_what_comes_back_leaves_the_way_there_as_it_was() -> None:
    assert run(Passage(LAST, back=lambda gs: gs[::-1])) == (32.0, 23.0)


def test_one_place_alone_is_changed() -> None:
    assert run(Passage({"output 1 of 0"}, there=lambda xs: tuple(x * 0 for x in xs))) == (2.0, 32.0)
    assert run(Passage({"output 7 of 0"}, there=lambda xs: tuple(x * 0 for x in xs))) == (32.0, 32.0)


def test_several_passages_are_all_in_it() -> None:
    there, back = Passage(LAST, there=lambda xs: (xs[0], xs[0])), Passage(LAST, back=lambda gs: gs[::-1])
    assert run(there, back) == (22.0, 23.0)
