"""Specimens: faults planted on purpose, to show that the oracle and the diagnosis find them.

A row of a table is a specimen: its name, a description, a public report, its composition, a case's requirements, and
the truth: the law that must fail, and the cause to name.

- A specimen is planted by composition: a changed program or data, or a wrapped transport, stage, gradient work or step.
  The runtime has no line for any of them. What they are made of is in ``planting``.
- A control looks like a fault and is none: it must pass.
- Most show on any ranks. Some need a device; races and deadlocks of messages need simulated ranks.
- Sixteen are of steps by hand in mixed precision, which our own runtime has not. They are held against themselves.
- A file of a user's own adds some: ``register(Specimen(...))``.

Planter and explainer share no code, and a case with a specimen is judged like any other. ``try_out`` reports whether it
was caught, correctly named, and located. ``shrink`` reduces a random case that shows it to the smallest.

It stands on the extension point ``faults``, where a case finds what it names, and asks ``expectations`` for what steps
by hand are held against. Begin with ``specimen``, what a row is, then ``planting`` and a table in ``families``.
"""

from pipeproof.own.faults import SpecimenError as SpecimenError
from pipeproof.wings.specimens.catalogue import CATALOGUE as CATALOGUE
from pipeproof.wings.specimens.catalogue import CONTROLS as CONTROLS
from pipeproof.wings.specimens.catalogue import DEVICE_CONTROLS as DEVICE_CONTROLS
from pipeproof.wings.specimens.catalogue import IN_SIMULATION as IN_SIMULATION
from pipeproof.wings.specimens.catalogue import ON_DEVICES as ON_DEVICES
from pipeproof.wings.specimens.catalogue import SIMULATED_CONTROLS as SIMULATED_CONTROLS
from pipeproof.wings.specimens.catalogue import SPECIMENS as SPECIMENS
from pipeproof.wings.specimens.catalogue import fault as fault
from pipeproof.wings.specimens.catalogue import register as register
from pipeproof.wings.specimens.specimen import Entry as Entry
from pipeproof.wings.specimens.specimen import Fault as Fault
from pipeproof.wings.specimens.specimen import Needs as Needs
from pipeproof.wings.specimens.specimen import Specimen as Specimen

# What judges or draws cases is not for ranks to load, which plant specimens alone.
__all__ = ["choice", "mixed", "shrinking", "tables", "trial"]
