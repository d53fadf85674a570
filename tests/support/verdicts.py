"""Verdicts made by hand, as pages show them: one of each outcome, and a large one."""

from dataclasses import replace

from pipeproof.core.cause import Cause, Cell, Cells, RuledOut
from pipeproof.core.measured import Compared, Done, Measured, Ran, Sight, Weights
from pipeproof.core.verdict import LawResult, Mismatch, Size, Verdict
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.schedules import build

LIMIT = 1e-6
WRONG = Sight("input", False, False, "microbatch 1's, expected microbatch 0's", 0.9, LIMIT, "0F1", "0F0")
RIGHT = Sight("output of the module", True, True, error=0.0, limit=LIMIT)
FIRST = tuple(Done(0, Kind.FORWARD, m, (RIGHT,)) for m in range(2))
RAN = Ran(
    1,
    2,
    (0, 1),
    (
        (*FIRST, *(Done(0, Kind.BACKWARD, m) for m in range(2))),
        (
            Done(1, Kind.FORWARD, 0, (WRONG,)),
            Done(1, Kind.BACKWARD, 0, (replace(WRONG, really="", expected="", observed=""),)),
            Done(1, Kind.FORWARD, 1, (RIGHT,)),
            Done(1, Kind.BACKWARD, 1, (replace(RIGHT, agrees=None),)),
        ),
    ),
)
COMPARED = (
    Compared("loss", 1, "pass", rank=1, microbatch=0, observed=2.5, expected=2.5),
    Compared("loss", 1, "fail", rank=1, microbatch=1, error=0.04, floor=1e-8, limit=LIMIT, observed=2.6, expected=2.5),
    Compared("gradient", 1, "fail", 1, 1, None, "head.weight", 0.3, 1e-7, LIMIT),
    Compared("gradient", 1, "pass", 0, 0, None, "body.weight", 2e-7, 1e-7, LIMIT),
    Compared("grad-norm", 1, "pass", rank=0, observed=7.5, expected=7.5),
)
CELLS = Cells(((Cell(1.0), Cell(1.0)), (Cell(0.0, ((1, 1.0),)), Cell(None))))
LAWS = (
    LawResult("loss", "fail", 2, 1, 1, 0.04, 1e-8),
    LawResult("gradient", "fail", 2, 0, 1, 0.3, 1e-7),
    LawResult("grad-norm", "not observed", note="no rank reports a norm"),
    LawResult("boundaries", "pass", 7, 7, note="not compared: mask", left_out=("mask of 1F0",)),
)
FAILED = Verdict(
    "1f1b r2 s2 m2 seed=17",
    "fail",
    "none",
    LAWS,
    (
        Mismatch("gradient", 1, Size((2,), 2.0), Size((2,), 1.0), "tensor", 1, 1, parameter="head.weight", error=0.3),
        Mismatch("loss", 1, 2.6, 2.5, "number", 1, microbatch=1, error=0.04, limit=LIMIT),
    ),
    (Cause("wrong-message", rank=1, stage=1, microbatches=(0,), action="1F0", detail="input is microbatch 1's"),),
    ruled_out=(RuledOut(("mode",), "every stage ran in the right mode", 4),),
    cells=CELLS,
    bindings="1f1b, P 2, seed 17",
    seconds=1.5,
    measured=Measured(COMPARED, RAN, 1, (Weights("head.weight", CELLS.rows[1]),)),
)
PASSED = Verdict("gpipe r1 s1 m2", "pass", "fp32", LAWS[3:], measured=Measured(COMPARED[3:]))
BARE = Verdict("mine", "unknown", "none", (), headline="rank 1 hangs", failure="rank 0: waits\nrank 1: waits")


def large() -> Verdict:
    """10,000 actions on 16 ranks, each with what passed, and 1,000 parameters."""
    microbatches = 312
    observed = (replace(RIGHT, what="input", made=False), RIGHT)
    schedule = build("1f1b", ranks=16, virtual=1, microbatches=microbatches)
    rows = tuple(tuple(Done(*action, observed) for action in row) for row in schedule.ranks)
    broken = Done(7, Kind.FORWARD, 200, (replace(WRONG, really="6F3", expected="6F200"),))
    rows = tuple(tuple(broken if one.action == "7F200" else one for one in row) for row in rows)
    names = [f"blocks.{k}.attention.projection.weight" for k in range(1000)]
    compared = tuple(
        Compared("gradient", 1, "pass", k % 16, k % 16, None, name, 1e-7 * (k + 1) / 1000, 1e-8, LIMIT)
        for k, name in enumerate(names)
    )
    row = tuple(Cell(float(m != 200)) for m in range(microbatches))
    weights = tuple(Weights(name, row) for name in names)
    measured = Measured(compared, Ran(1, microbatches, tuple(range(16)), rows), 7, weights)
    cause = replace(FAILED.causes[0], rank=7, stage=7, microbatches=(200,), action="7F200")
    return replace(FAILED, causes=(cause,), cells=Cells((row,) * 16), measured=measured)
