"""What the first wrong tensor is called, and of which microbatches."""

from functools import partial
from typing import Any

from torch import nn

from pipeproof import watch
from pipeproof.core.observe.likeness import Likeness
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH
from pipeproof.core.observe.recording import MADE, Point
from pipeproof.explain.divergence import Divergence
from pipeproof.explain.rules.boundaries import causes_of
from pipeproof.whitebox import WhiteBox
from tests.support.steps import backward, blocks, loss_fn, pairs


def cut_off(model: Any, microbatches: list[Any]) -> Any:
    """Four stages; the graph of stage 2 is cut off from its input, but for zeros."""
    stages = [watch(model[k : k + 1]) for k in range(4)]
    inner = stages[2].forward
    stages[2].forward = lambda x: inner(x.detach() + 0 * x)
    return stages, backward(nn.Sequential(*stages), microbatches)


def test_a_graph_that_was_cut_gives_zeros_that_nobody_wrote(whitebox_here: WhiteBox) -> None:
    build = partial(blocks, seed=3)
    verdict = whitebox_here.validate(cut_off, reference=build, microbatches=pairs(4), ranks=1, loss_fn=loss_fn)
    first = verdict.causes[0]
    assert (first.kind, first.stage, first.action) == ("zero", 2, "2B0")


def test_a_call_whose_microbatch_is_not_known_is_no_microbatch() -> None:
    likeness = Likeness("zero", words="zero")
    found = [Divergence(0, Point(0, m, MADE), f"0F{m}", None, likeness) for m in (UNKNOWN_MICROBATCH, 2)]
    (cause,) = causes_of(found, 4, refine=lambda one: None)
    assert cause.microbatches == (2,)
