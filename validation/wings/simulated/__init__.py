"""Simulated ranks: a whole job in one process; a seed decides which rank is next and when messages move.

A race or a hang that depends on timing shows once in a thousand runs of real ranks. Here each rank is a thread, and one
runs at a time. At each call of ``torch.distributed`` the thread yields, and an adversary chooses a rank that can go on,
or a message that may move under the transport's rules. A seed is an interleaving: it repeats a run message for message.
``most`` runs each distinct interleaving once.

Use of a buffer in flight is a race, reported with the lines that caused it: a receive buffer holds poison until its
wait, and a sent buffer is compared when it leaves. A state where no rank can go on is a deadlock, reported at once with
who waits for whom. Each rank has its own clock, and its own copy of Python's process-wide state.

It has two halves. ``engine`` knows no torch: ``scheduler`` (turns), ``decisions``, ``exploration`` (remaining runs),
``clock``. The other half wraps torch.distributed: ``network`` and ``collectives``
carry messages, ``group`` and ``work`` face torch, ``buffers`` are in flight, ``own_state`` separates ranks, and
``torch_inside`` has all private names of torch.

It is the ``World`` of kind "simulated". Begin with ``world``, then ``play``: a run from its first turn to its last.
"""

from pipeproof.wings.simulated.engine.simulation import EVERY as EVERY
from pipeproof.wings.simulated.engine.simulation import Decisions as Decisions
from pipeproof.wings.simulated.engine.simulation import Simulation as Simulation
from pipeproof.wings.simulated.engine.simulation import Timing as Timing
from pipeproof.wings.simulated.world import SimulatedWorld as SimulatedWorld
