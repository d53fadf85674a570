"""How long a run may take: as long as it moves on, and not for ever."""

from pipeproof.worlds.simulated.scheduler import Scheduler
from pipeproof.worlds.timeout import END_S, LOOK_S

WHOLE = 5  # times the bound of one that stands still: a slow machine is no hang, and what never ends is cut


def held_up(scheduler: Scheduler, *, timeout_s: float, whole_s: float) -> str:
    """Wait until a run has ended. Empty then; else what is said of the rank that has the turn, as it goes on.

    Time counts in looks at the run, so that none passes while the machine sleeps. Who only asks moves nothing on. Of a
    run that is over it is known how it ended: who does not give up then, as one that catches all, is not waited for.
    """
    looks = came_back = moved = turns = steps = over = 0
    while not scheduler.done.wait(LOOK_S):
        looks += 1
        over += scheduler.over
        if over * LOOK_S >= min(END_S, timeout_s):
            return "does not give up"
        if scheduler.turns != turns:
            turns, came_back = scheduler.turns, looks
        if scheduler.steps != steps:
            steps, came_back, moved = scheduler.steps, looks, looks
        if (looks - came_back) * LOOK_S >= timeout_s:
            return f"did not come back to the network within {timeout_s:g} s"
        if (looks - moved) * LOOK_S >= timeout_s:
            return f"has had turn after turn, and nothing has moved for {timeout_s:g} s"
        if looks * LOOK_S >= whole_s:
            return f"still goes on after {whole_s:.3g} s, and so does the run"
    return ""
