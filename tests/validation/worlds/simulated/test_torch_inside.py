"""Who asks for numbers is heard below all functions of torch, and is given the same numbers."""

from collections.abc import Callable

import pytest
import torch

from pipeproof.worlds.simulated.torch_inside import asked_for_numbers, unwatched

NUMBERS = torch.tensor([2, 1, 2])


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.tensor([NUMBERS[0]]),
        lambda: torch.ones(3)[NUMBERS[1]],
        lambda: NUMBERS[NUMBERS > 1],
        lambda: torch.nonzero(NUMBERS, as_tuple=True),
        lambda: torch.masked_select(NUMBERS, NUMBERS > 1),
        lambda: torch.equal(NUMBERS, NUMBERS),
        lambda: torch.bincount(NUMBERS, minlength=6),
        lambda: torch.repeat_interleave(NUMBERS, NUMBERS, output_size=5),
        lambda: torch.unique(NUMBERS, return_counts=True),
        lambda: torch.unique(NUMBERS, dim=0, return_inverse=True),
        lambda: torch.unique_consecutive(NUMBERS, dim=0),
        lambda: torch.cpu.synchronize(),
    ],
)
def test_who_asks_for_numbers_is_heard_and_gets_them(ask: Callable[[], object]) -> None:
    heard: list[str] = []
    given = str(ask())
    with asked_for_numbers(lambda: heard.append("numbers"), lambda: heard.append("all")):
        assert str(ask()) == given
        assert heard
        heard.clear()
        unwatched(lambda: torch.equal(NUMBERS, NUMBERS))()
        assert torch.zeros(3).add(NUMBERS).shape == (3,)
        assert not heard
    ask()
    assert not heard
