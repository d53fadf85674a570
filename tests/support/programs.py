"""Programs to draw: right ones, and others whose messages are in another order."""

from hypothesis import strategies as st

from pipeproof.pipeline.action import COMPUTE
from pipeproof.pipeline.columns import Columns
from pipeproof.pipeline.program import Program, lower
from pipeproof.pipeline.schedules import build, virtuals


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A good program, lowered early or not, some of its neighbours swapped."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-min"]))
    sizes = {"ranks": draw(st.integers(2, 3)), "microbatches": draw(st.integers(1, 3))}
    good = lower(build(name, **sizes, virtual=virtuals(name, looped=2)), early=draw(st.integers(0, 2)))
    rows = [list(row) for row in good.ranks]
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(rows))
        slot = draw(st.integers(0, len(row) - 2))
        pair = row[slot : slot + 2]
        if any(action.kind not in COMPUTE for action in pair):
            row[slot : slot + 2] = pair[::-1]
    return Program(good.schedule, Columns.of(rows))
