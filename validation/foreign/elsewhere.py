"""Of a hang on simulated ranks: the transports on which it happens, and those on which it does not, with what room."""

from dataclasses import replace

from pipeproof.core.verdict import Verdict
from pipeproof.pipeline.sizes import some
from pipeproof.pipeline.transports import RULES, Transport
from pipeproof.worlds.world import World

_AHEAD = "; on NCCL a program goes on after wait() while its device waits: there it may end"


def told_of_transports(verdict: Verdict, world: World) -> Verdict:
    """``verdict`` on what ``world`` ran last, which where it hangs says on which other transports it does."""
    found = world.hangs_on() if verdict.ended == "hang" else {}
    if not found.get(world.transport):  # nothing is known of others, or it does not hang again
        return verdict
    hanging, ending = ([one for one in found if found[one] is hangs] for hangs in (True, False))
    where = f"with transport {_listed(hanging)}, and not with {_listed(ending)}" if ending else "with every transport"
    room = world.least_room()
    kept = f"; with room for {some(room, 'byte')} from one rank to another it ends, under this seed" if room else ""
    ahead = _AHEAD if world.may_end() else ""
    return replace(verdict, headline=f"{verdict.headline}; it hangs {where}{kept}{ahead}")


def _listed(transports: list[Transport]) -> str:
    names = [f"{one.value} ({', '.join(known)})" if (known := RULES[one].known_as) else one.value for one in transports]
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
