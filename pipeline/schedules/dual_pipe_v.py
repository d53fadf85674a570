"""DualPipeV: forwards and backwards of two chunks run as one, over a V (DeepSeek-V3, arXiv 2412.19437; cut in half).

Drawn for P = 2, M = 4 (F, I and W are one cell, B two; rank 0 has stages 0 and 3; 0F3 3B1 runs as one)::

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3B1   . 3F2 0B0 0B0 3B2 3B2   . 3F3 0B1 0B1 3B3 3B3 0I2 0W2 0I3 0W3
    rank 1 |   . 1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 1F3 2B1 2B1 2F3 1B1 1B1 2B2 2B2 1B2 1B2   . 2I3 1I3 2W3 1W3

DualPipe itself holds every stage on two ranks, r and P-1-r, feeds half of the microbatches in at either end and adds
the two copies' weight gradients; P and M must be even, M >= 2P. A ``Schedule`` says where *the* copy of a stage lives
(``placement``). It would take a direction in every action (neither our text nor torch's has a place for one), a
placement by (direction, stage), laws that count by direction, and in the runtime two modules per stage with a sum over
both before the norm. At equal times that buys, on as many ranks, a global bubble of P-2 for P-1 of a rank's units
(DeepSeek's table of DualPipe) at twice the weights; so the library has the schedule here, which needs none of it.
"""

from pipeproof.pipeline.action import Action
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.schedules.vee import Row, placement


def dual_pipe_v(*, ranks: int, microbatches: int) -> Schedule:
    """Run eight steps, as DeepSeek's ``dualpipev.py`` and torch's ``ScheduleDualPipeV``, which need M >= 2P.

    At equal times the global bubble is 2 (P-1) units, whatever M; ranks hold up to 2P+1 chunk activations.
    """
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"microbatches is {microbatches}: dualpipev on {ranks} ranks needs at least {2 * ranks} (twice the ranks)"
        )
    rows, overlaps = zip(*(_row(rank, ranks, microbatches) for rank in range(ranks)), strict=True)
    pairs = tuple((rank, slot) for rank, slots in enumerate(overlaps) for slot in slots)
    return Schedule("dualpipev", microbatches, placement(ranks), rows, pairs)


def _row(rank: int, ranks: int, microbatches: int) -> tuple[tuple[Action, ...], list[int]]:
    """A rank's actions, and slots of forwards that overlap with the next backward."""
    row, slots = Row(rank, ranks), list[int]()
    behind = ranks - 1 - rank

    def overlap(forward: str, backward: str) -> None:
        slots.append(len(row.actions))
        row.run(f"{forward} {backward}")

    row.run("F0", 2 * behind)
    row.run("F0 F1", rank + 1)
    row.run("I1 W F1", behind)
    for turn in range(microbatches - 2 * ranks + rank + 1):
        if turn == 0 and rank == ranks - 1:
            row.run("F0 B1")  # not as one: the last rank would keep the others waiting for longer
        else:
            overlap("F0", "B1")
        overlap("F1", "B0")
    for _ in range(behind):
        row.run("B1")
        overlap("F1", "B0")
    _drain(row, rank, behind)
    return tuple(row.actions), slots


def _drain(row: Row, rank: int, behind: int) -> None:
    """B1 B0 alternate rank + 1 times, the second half with I for B; then W and backwards of chunk 0; then W."""
    for k in range(2 * (rank + 1)):
        row.run(("B" if k <= rank else "I") + ("0" if k % 2 else "1"))
    row.run("W I0", behind)
    row.run("W", rank + 1)
