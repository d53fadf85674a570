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

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from pipeproof.wings.specimens.choice import choose as choose
    from pipeproof.wings.specimens.choice import load as load
    from pipeproof.wings.specimens.choice import runs_of as runs_of
    from pipeproof.wings.specimens.choice import specimens_on as specimens_on
    from pipeproof.wings.specimens.choice import tries_on as tries_on
    from pipeproof.wings.specimens.choice import usual_on as usual_on
    from pipeproof.wings.specimens.mixed import MIXED as MIXED
    from pipeproof.wings.specimens.mixed import RIGHT as RIGHT
    from pipeproof.wings.specimens.mixed import MixedCase as MixedCase
    from pipeproof.wings.specimens.mixed import MixedFault as MixedFault
    from pipeproof.wings.specimens.mixed_check import try_mixed as try_mixed
    from pipeproof.wings.specimens.mixed_check import validate_mixed as validate_mixed
    from pipeproof.wings.specimens.shrinking import Shrunk as Shrunk
    from pipeproof.wings.specimens.shrinking import shrink as shrink
    from pipeproof.wings.specimens.tables import COLUMNS as COLUMNS
    from pipeproof.wings.specimens.tables import IN_SIMULATION_COLUMNS as IN_SIMULATION_COLUMNS
    from pipeproof.wings.specimens.tables import confusion as confusion
    from pipeproof.wings.specimens.tables import counts as counts
    from pipeproof.wings.specimens.tables import line as line
    from pipeproof.wings.specimens.tables import listing as listing
    from pipeproof.wings.specimens.tables import pairs_of as pairs_of
    from pipeproof.wings.specimens.tables import totals as totals
    from pipeproof.wings.specimens.trial import Named as Named
    from pipeproof.wings.specimens.trial import Trial as Trial
    from pipeproof.wings.specimens.trial import case_for as case_for
    from pipeproof.wings.specimens.trial import search as search
    from pipeproof.wings.specimens.trial import smallest_of as smallest_of
    from pipeproof.wings.specimens.trial import try_out as try_out

# What judges or draws cases is not for ranks to load, which plant specimens alone.
_LATER = {
    "choice": ("choose", "load", "runs_of", "specimens_on", "tries_on", "usual_on"),
    "mixed": ("MIXED", "RIGHT", "MixedCase", "MixedFault"),
    "mixed_check": ("try_mixed", "validate_mixed"),
    "shrinking": ("Shrunk", "shrink"),
    "tables": ("COLUMNS", "IN_SIMULATION_COLUMNS", "confusion", "counts", "line", "listing", "pairs_of", "totals"),
    "trial": ("Named", "Trial", "case_for", "search", "smallest_of", "try_out"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
