"""The smallest interleaving that still fails: the fewest preemptions, the others left out one after another."""

from collections.abc import Callable, Sequence

from pipeproof.worlds.simulated.guide import Guide, Preemption, preemptions
from pipeproof.worlds.timeout import BUDGET
from pipeproof.worlds.world import World


def fewest(world: World, fails: Callable[[], bool]) -> None:
    """Leave in ``world`` the fewest preemptions under which what it runs still ``fails``; its seed where none does.

    Delta debugging, by Zeller and Hildebrandt (2002), without its complements: halves first, then quarters, ...
    """
    before, world.noted = world.seed, True
    if not fails() or world.course is None:
        return
    kept, left = preemptions(world.course.events), BUDGET

    def still(some: Sequence[Preemption]) -> bool:
        nonlocal left
        left -= 1
        world.seed = Guide(tuple(some))
        return fails()

    if not still(kept):
        world.seed = before
        return
    if still(()):
        return
    size = len(kept)
    while size > 1 and left > 0:
        size = (size + 1) // 2
        start = 0
        while start < len(kept) and left > 0:
            fewer = (*kept[:start], *kept[start + size :])
            if fewer and still(fewer):
                kept = fewer
            else:
                start += size
    world.seed = Guide(kept)
