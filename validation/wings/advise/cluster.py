"""A job's hardware: accelerators, and the links between them."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import list_known
from pipeproof.pipeline.sizes import check_count, check_measure

GIB = float(1 << 30)
UNITS = {"memory": GIB, "flops": 1e12, "link": 1e9, "network": 1e9}  # in which a user says them
_MOST_DEVICES = 1 << 20


@dataclass(frozen=True)
class Accelerator:
    """One device: bf16 operations per second (dense), bytes of memory, bytes per second to its node and to others.

    ``link`` and ``network``: one direction on one device, from its maker's figures.
    """

    name: str
    flops: float
    memory: float
    link: float
    network: float


@dataclass(frozen=True)
class Cluster:
    """``devices`` accelerators, ``per_node`` in a node."""

    device: Accelerator
    devices: int
    per_node: int = 8

    def __post_init__(self) -> None:
        check_count("devices", self.devices, most=_MOST_DEVICES)
        check_count("per-node", self.per_node, most=_MOST_DEVICES)
        for what, unit in UNITS.items():
            check_measure(what, getattr(self.device, what) / unit)

    def between(self, group: int) -> float:
        """Return a device's bytes per second within a group of ``group`` neighbours."""
        return self.device.link if group <= self.per_node else self.device.network


def _by_name(*devices: Accelerator) -> Mapping[str, Accelerator]:
    return {device.name: device for device in devices}


# Makers' data sheets; the network is what the machines of that name commonly have: one port for each device.
ACCELERATORS = _by_name(
    Accelerator("v100", 125e12, 32 * GIB, 150e9, 12.5e9),  # fp16; NVLink 2
    Accelerator("a100-40", 312e12, 40 * GIB, 300e9, 25e9),  # NVLink 3, HDR
    Accelerator("a100", 312e12, 80 * GIB, 300e9, 25e9),
    Accelerator("h800", 989e12, 80 * GIB, 200e9, 50e9),  # NVLink cut to 400 GB/s both ways
    Accelerator("h100", 989e12, 80 * GIB, 450e9, 50e9),  # NVLink 4, NDR
    Accelerator("h200", 989e12, 141 * 1e9, 450e9, 50e9),
    Accelerator("b200", 2250e12, 180 * 1e9, 900e9, 50e9),  # NVLink 5
    Accelerator("mi250x", 383e12, 128 * GIB, 250e9, 25e9),  # two dies
    Accelerator("mi300x", 1307e12, 192 * 1e9, 448e9, 50e9),
)


def accelerator_named(name: str) -> Accelerator:
    """Return a device from the table. Raises ``ScheduleError`` for an unknown name."""
    plain = name.lower()
    if plain not in ACCELERATORS:
        raise ScheduleError(f"unknown device {name!r}: {list_known(plain, list(ACCELERATORS))}")
    return ACCELERATORS[plain]
