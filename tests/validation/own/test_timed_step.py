"""Memory is counted."""

import pytest
import torch

from pipeproof.own.timed_step import allocations

MIB = 1 << 20


def of(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


@pytest.mark.parametrize(("marked", "most"), [(False, 5), (True, 3)])
def test_the_most_counts_from_the_mark_with_what_is_held_there(marked: bool, most: int) -> None:
    with allocations() as found:
        kept = of(1)
        more = of(4)
        del more
        if marked:
            found.mark()
        less = of(2)
        del less
    assert (kept.numel() * 4, found.net) == (MIB, pytest.approx(MIB, abs=1024))
    assert found.most == pytest.approx(most * MIB, abs=1024)


def test_nothing_takes_nothing() -> None:
    with allocations() as found:
        pass
    assert (found.net, found.most) == (0, 0)
