"""Planted faults, by composition only: changed programs and data, wrapped transports, stages, gradient work, steps."""

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
from validation.cases.specimens.specimen import Planted, Specimen

FAMILIES = (scale, microbatches, state, halves, gradients, tied, norm, report, messages, memory, model, order)
SPECIMENS: Mapping[str, Specimen] = MappingProxyType(
    {specimen.name: specimen for family in FAMILIES for specimen in family.SPECIMENS}
)
# Changes without a fault, which must pass.
CONTROLS: Mapping[str, Planted] = MappingProxyType({control.name: control for control in sound.CONTROLS})
_NONE = Planted(name="", summary="nothing planted", origin="", smallest="")


class SpecimenError(ValueError):
    """A specimen that does not exist."""


def specimen(name: str) -> Planted:
    """The specimen or control ``name``; the empty name plants nothing."""
    if not name:
        return _NONE
    found = SPECIMENS.get(name) or CONTROLS.get(name)
    if found is None:
        raise SpecimenError(f"unknown specimen {name!r}: known are {', '.join(SPECIMENS)}")
    return found
