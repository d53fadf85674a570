"""Planted faults, by composition only: changed programs and data, wrapped transports, stages and gradient work."""

from collections.abc import Mapping
from types import MappingProxyType

from validation.specimens import gradients, microbatches, scale, tied
from validation.specimens.specimen import Specimen

SPECIMENS: Mapping[str, Specimen] = MappingProxyType(
    {specimen.name: specimen for family in (scale, microbatches, gradients, tied) for specimen in family.SPECIMENS}
)
_NONE = Specimen(name="", summary="nothing planted", origin="", smallest="", law="")


class SpecimenError(ValueError):
    """A specimen that does not exist."""


def specimen(name: str) -> Specimen:
    """The specimen ``name``; the empty name plants nothing."""
    if not name:
        return _NONE
    if name not in SPECIMENS:
        raise SpecimenError(f"unknown specimen {name!r}: known are {', '.join(SPECIMENS)}")
    return SPECIMENS[name]
