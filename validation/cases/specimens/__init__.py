"""Planted faults, by composition only: changed programs and data, wrapped transports, stages, gradient work, steps.

A file of one's own calls ``register(Specimen(...))``; what faults are made of is in ``planting``.
"""

from collections.abc import Mapping
from types import MappingProxyType

from validation.cases.specimens import (
    gradients,
    halves,
    memory,
    messages,
    microbatches,
    model,
    norm,
    order,
    report,
    scale,
    sound,
    state,
    tied,
)
from validation.cases.specimens.plugin import Plugins, SpecimenError
from validation.cases.specimens.specimen import Fault, Needs, Planted, Specimen

__all__ = ["CONTROLS", "FAMILIES", "SPECIMENS", "Fault", "Needs", "Specimen", "SpecimenError", "register", "specimen"]

FAMILIES = (scale, microbatches, state, halves, gradients, tied, norm, report, messages, memory, model, order)
_KNOWN = {specimen.name: specimen for family in FAMILIES for specimen in family.SPECIMENS}
SPECIMENS: Mapping[str, Specimen] = MappingProxyType(_KNOWN)
# Changes without a fault, which must pass.
CONTROLS: Mapping[str, Planted] = MappingProxyType({control.name: control for control in sound.CONTROLS})
_NONE = Planted(name="", summary="nothing planted", origin="")
PLUGINS = Plugins(_KNOWN, taken=tuple(CONTROLS))
register = PLUGINS.register


def specimen(name: str) -> Planted:
    """The specimen or control ``name``; the empty name plants nothing."""
    if not name:
        return _NONE
    found = SPECIMENS.get(name) or CONTROLS.get(name)
    if found is None:
        known = ", ".join(SPECIMENS)
        raise SpecimenError(f"unknown specimen {name!r}: known are {known}; one of your own needs --plugin FILE")
    return found
