"""What is drawn of a framework: every layout and option that its adapter covers, the plainest first."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from pipeproof.own.case import CaseError
from tests.frameworks.engines.framework_case import LAYOUTS, FrameworkCase
from tests.frameworks.engines.framework_layout import FrameworkLayout

MAX_RANKS, MAX_MICROBATCHES, MAX_LAYERS = 4, 9, 12
# P and DP; that which has most to be wrong is drawn three times as often.
_SHAPES = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (2, 2), (2, 2))


def framework_cases(framework: str, *, max_ranks: int = MAX_RANKS) -> st.SearchStrategy[FrameworkCase]:
    """Any case of this framework: P and DP within ``max_ranks``, V, M 1..9, 1..12 layers, each option, a seed.

    Raises ``CaseError`` where the framework needs more ranks.
    """
    least = LAYOUTS[framework].least_ranks
    if max_ranks < least:
        raise CaseError(f"max_ranks is {max_ranks}: {framework} has pipelines on {least} ranks and more; allow these")
    return _cases(LAYOUTS[framework], [(p, d) for p, d in _SHAPES if least <= p and p * d <= max_ranks])


@st.composite
def _cases(draw: st.DrawFn, kind: type[FrameworkLayout], shapes: list[tuple[int, int]]) -> FrameworkCase:
    """An option is drawn only where the framework can have it beside those before it, at some depth of the model.

    Every case takes equally many draws: fewer of them would count as a smaller case when it is shrunk.
    """

    def one_of(found: Sequence[Any], most: int) -> Any:
        """One of ``found``, which has up to so many."""
        return found[draw(st.integers(0, most - 1)) % len(found)]

    pp, dp = draw(st.sampled_from(shapes))
    sizes = _sizes(kind.framework, pp, dp)
    vp = one_of(list(sizes), kind.most_virtual)
    microbatches = one_of(sizes[vp], MAX_MICROBATCHES)
    layout = kind(pp=pp, vp=vp, dp=dp)
    for name, offered in kind.offered.items():
        can = [value for value in offered if any(_depths(layout, microbatches, **{name: value}))]
        if not can:
            reject()
        layout = replace(layout, **{name: one_of(can, len(offered))})
    layers = one_of(list(_depths(layout, microbatches)), MAX_LAYERS)
    return FrameworkCase(replace(layout, layers=layers, seed=draw(st.integers(0, 2**16))), microbatches)


@cache
def _sizes(framework: str, pp: int, dp: int) -> dict[int, list[int]]:
    """For each V that there may be, the numbers of microbatches: with some value of the option that is drawn first."""
    kind = LAYOUTS[framework]
    first = next(iter(kind.offered))
    found = {}
    for vp in range(1, kind.most_virtual + 1):
        layout = kind(pp=pp, vp=vp, dp=dp)
        found[vp] = [
            microbatches
            for microbatches in range(1, MAX_MICROBATCHES + 1)
            if any(any(_depths(layout, microbatches, **{first: value})) for value in kind.offered[first])
        ]
    return {vp: microbatches for vp, microbatches in found.items() if microbatches}


def _depths(layout: FrameworkLayout, microbatches: int, **told: Any) -> Iterator[int]:
    """The numbers of layers with which the framework can have it, told this too."""
    every = ((layers, replace(layout, layers=layers, **told)) for layers in range(1, MAX_LAYERS + 1))
    return (layers for layers, one in every if not one.why_not(microbatches))
