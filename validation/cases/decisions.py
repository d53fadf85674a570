"""What a campaign draws for simulated ranks beside each case: the transport, and the seed that decides all the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from pipeproof.cases.case import Case
from pipeproof.cases.runtimes import OWN
from pipeproof.pipeline.sizes import MOST_SEED
from pipeproof.pipeline.transports import RULES, Transport
from pipeproof.worlds.simulated.guide import Guide
from pipeproof.worlds.simulation import Simulation

# From the one that waits least, so that shrinking moves to what everybody has.
EVERY = tuple(sorted(Transport, key=lambda one: (one is not Transport.UNLIMITED, RULES[one].blocking)))

_ROOMS = (0, 256, 4096)  # bytes: for no message of the smallest models, for some, and for several


@dataclass(frozen=True)
class Decisions:
    """Of simulations like ``like``: those with any seed, where ``seeds``, and with any of ``transports``.

    Where there are several of these, they are with some room or other, too.
    """

    like: Simulation
    seeds: bool
    transports: Sequence[Transport]

    def __str__(self) -> str:
        seeds = "seeds drawn" if self.seeds else str(self.like)
        return f"{seeds}, transports {', '.join(one.value for one in self.transports)}"

    def __call__(self, case: Case) -> st.SearchStrategy[Simulation]:
        """A strategy of what decides ``case``; it shrinks to the first transport and to seed 0.

        Every schedule of ours ends under every transport. torch's runtime posts messages that cross, which end where
        nobody waits there and then.
        """
        seeds = st.integers(0, MOST_SEED) if self.seeds else st.just(self.like.first)
        ending = [one for one in self.transports if case.runtime == OWN or not RULES[one].blocking]
        rooms = st.sampled_from(_ROOMS) if len(self.transports) > 1 else st.just(self.like.room)

        def decided(drawn: tuple[Transport, int | Guide, int]) -> Simulation:
            transport, first, room = drawn
            return replace(self.like, transport=transport, first=first, room=0 if RULES[transport].by_name else room)

        return st.tuples(st.sampled_from(ending), seeds, rooms).map(decided)
