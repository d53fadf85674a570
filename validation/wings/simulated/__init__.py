"""Simulated ranks: all of a job in one process, where a seed decides who is next and when messages move.

A race or a hang that depends on timing shows once in a thousand runs of real ranks. Here each rank is a thread, of
which one runs at a time. At each call of ``torch.distributed`` the thread gives up its turn, and an adversary chooses:
a rank that can go on, or a message that may move within what the transport allows. So a seed is an interleaving, and
the same seed gives the same run, message for message. ``most`` asks for each interleaving that differs, once.

What a rank does with a buffer that is on its way is a race, and told by name with the lines that made it: what is to
be received holds poison until it is waited for, and what is sent is compared when it leaves. Where nobody can go on it
is a deadlock, told at once with who waits for whom. Each rank has a clock of its own, and finds what Python keeps once
for a process as it left it.

It has two halves. ``engine`` knows no torch: ``scheduler`` (turns), ``adversaries`` and ``guide`` (who decides),
``exploration`` (which runs are left), ``clock``. The other half wraps torch.distributed: ``network`` and
``collectives`` carry messages, ``group`` and ``work`` are what torch calls and is given, ``uses`` watches what code
does with buffers, ``own_state`` keeps ranks apart, and ``torch_inside`` has all private names of torch.

It stands on ``World``, where it is the kind "simulated". Begin with ``world``, then ``play``, a run from its first
turn to its last.
"""

from pipeproof.wings.simulated.engine.guide import parsed_interleaving as parsed_interleaving
from pipeproof.wings.simulated.engine.simulation import EVERY as EVERY
from pipeproof.wings.simulated.engine.simulation import Decisions as Decisions
from pipeproof.wings.simulated.engine.simulation import Simulation as Simulation
from pipeproof.wings.simulated.engine.simulation import Timing as Timing
from pipeproof.wings.simulated.world import SimulatedWorld as SimulatedWorld
