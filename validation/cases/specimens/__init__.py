"""Planted faults, by composition only: changed programs and data, wrapped transports, stages, gradient work, steps.

A file of one's own calls ``register(Specimen(...))``; what faults are made of is in ``planting``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, ModuleType

from pipeproof.cases.specimens import (
    collectives,
    crossings,
    devices,
    gradients,
    halves,
    keys,
    memory,
    messages,
    microbatches,
    model,
    norm,
    order,
    receives,
    report,
    scale,
    sends,
    sound,
    state,
    tied,
)
from pipeproof.cases.specimens.plugin import Plugins, SpecimenError
from pipeproof.cases.specimens.specimen import Fault, Needs, Planted, Specimen
from pipeproof.pipeline.schedules import nearest

__all__ = ["CONTROLS", "FAMILIES", "IN_SIMULATION", "ON_DEVICES", "SPECIMENS", "Fault", "Needs", "Specimen"]
__all__ += ["SpecimenError", "register", "specimen"]

_MODULES = (scale, microbatches, state, halves, gradients, tied, norm, report, messages, memory, model, order)
_SIMULATED = (sends, receives, crossings, collectives, keys)


def _families(*modules: ModuleType) -> Mapping[str, Sequence[Specimen]]:
    """The specimens of each module, by its name."""
    return MappingProxyType(
        {
            module.__name__.rpartition(".")[2]: tuple(replace(one, name=name) for name, one in module.SPECIMENS.items())
            for module in modules
        }
    )


FAMILIES = _families(*_MODULES)
SIMULATED_FAMILIES = _families(*_SIMULATED)
_KNOWN = {one.name: one for family in FAMILIES.values() for one in family}
SPECIMENS: Mapping[str, Specimen] = MappingProxyType(_KNOWN)
# Those that only a device shows, and not the CPU.
ON_DEVICES: Mapping[str, Specimen] = MappingProxyType({n: replace(one, name=n) for n, one in devices.SPECIMENS.items()})
# Those that simulated ranks show, and real ones by luck at best.
IN_SIMULATION: Mapping[str, Specimen] = MappingProxyType(
    {one.name: one for family in SIMULATED_FAMILIES.values() for one in family}
)
# Changes without a fault, which must pass.
CONTROLS: Mapping[str, Planted] = MappingProxyType({n: replace(one, name=n) for n, one in sound.CONTROLS.items()})
DEVICE_CONTROLS: Mapping[str, Planted] = MappingProxyType(
    {n: replace(one, name=n) for n, one in devices.CONTROLS.items()}
)
SIMULATED_CONTROLS: Mapping[str, Planted] = MappingProxyType(
    {n: replace(one, name=n) for module in _SIMULATED for n, one in module.CONTROLS.items()}
)
_NONE = Planted(summary="nothing planted", origin="")
PLUGINS = Plugins(_KNOWN, taken=(*CONTROLS, *ON_DEVICES, *DEVICE_CONTROLS, *IN_SIMULATION, *SIMULATED_CONTROLS))
register = PLUGINS.register


def specimen(name: str) -> Planted:
    """The specimen or control ``name``; the empty name plants nothing."""
    if not name:
        return _NONE
    for those in (SPECIMENS, CONTROLS, ON_DEVICES, DEVICE_CONTROLS, IN_SIMULATION, SIMULATED_CONTROLS):
        if name in those:
            return those[name]
    raise unknown(name)


def fault(name: str) -> Specimen:
    """The specimen ``name``, which is a fault."""
    found = specimen(name)
    if not isinstance(found, Specimen):
        raise unknown(name)
    return found


def unknown(name: str) -> SpecimenError:
    """The error that says which is nearest."""
    others = "pipeproof specimens --list prints all; one of your own needs --plugin FILE"
    return SpecimenError(
        f"unknown specimen {name!r}: {nearest(name, [*SPECIMENS, *ON_DEVICES, *IN_SIMULATION])}{others}"
    )
