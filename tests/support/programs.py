"""Programs to draw: right ones, and others whose messages are in another order."""

from hypothesis import strategies as st

from pipeproof.pipeline.action import COMPUTE, Action, Kind
from pipeproof.pipeline.columns import Columns
from pipeproof.pipeline.program import Program, lower
from pipeproof.pipeline.schedules import build, virtuals

ENDS = {  # of a message: how far the other stage is, and what it does
    Kind.SEND_F: (1, Kind.RECV_F),
    Kind.RECV_F: (-1, Kind.SEND_F),
    Kind.SEND_B: (-1, Kind.RECV_B),
    Kind.RECV_B: (1, Kind.SEND_B),
}


def partner(action: Action) -> Action:
    """The other end of a message, by its name alone."""
    shift, other = ENDS[action.kind]
    return Action(action.stage + shift, other, action.microbatch)


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
