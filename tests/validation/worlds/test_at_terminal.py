"""What ranks print carries their number; their debugger needs a terminal, and no run ends while it is used."""

import io
import pdb
import sys
import time

import pytest

from pipeproof.worlds import at_terminal
from pipeproof.worlds.at_terminal import RankStream
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import RankFailed, World
from tests.support.golden import golden


def test_each_line_carries_the_rank_and_goes_whole() -> None:
    behind = io.StringIO()
    stream = RankStream(behind, "[rank 1] ")
    for piece in ("one ", "two", "\n", "three\nfour"):
        stream.write(piece)
    assert behind.getvalue().count("\n") == 2
    stream.finish()
    stream.finish()
    golden(behind.getvalue())


def test_without_a_terminal_a_breakpoint_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr", "breakpointhook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(pdb, "set_trace", pdb.set_trace)
    monkeypatch.setattr(at_terminal, "_TERMINAL", "/no/such/terminal")
    at_terminal.settle(2, "folder")
    for stop, chosen in ((breakpoint, ""), (pdb.set_trace, "0"), (breakpoint, "pdb.set_trace")):
        monkeypatch.setenv("PYTHONBREAKPOINT", chosen)
        with pytest.raises(
            RuntimeError, match=r"a breakpoint on rank 2, and no terminal here to ask at: run this test"
        ):
            stop()


def asks(context: RankContext) -> None:
    """A job with a debugger that reads the rank's own standard input, which is empty."""
    pdb.Pdb(stdin=io.StringIO()).set_trace()


def test_a_debugger_that_finds_no_terminal_says_which_do(world: World) -> None:
    with pytest.raises(RankFailed, match=r"BdbQuit: the debugger was left, or had no terminal: breakpoint\(\) and"):
        world.run(asks, ranks=1)


def pauses(context: RankContext, debugged: bool) -> int:
    """A job that takes longer than its bound, and may be looked into meanwhile."""
    if debugged:
        folder = pdb.set_trace.__closure__[0].cell_contents  # type: ignore[attr-defined]
        at_terminal.debugging(folder).touch()
    time.sleep(1.5)
    return context.rank


@pytest.mark.sweep
def test_a_run_that_somebody_looks_into_has_no_bound(world: World) -> None:
    assert world.run(pauses, True, ranks=1, timeout_s=1.0) == [0]
    with pytest.raises(RankFailed, match="did not finish within 1 s"):
        world.run(pauses, False, ranks=1, timeout_s=1.0)
