"""Capabilities on top of the core, unknown to it: each folder is one, and can be removed."""

from collections.abc import Mapping
from importlib.util import find_spec

_ADAPTERS = ("colossalai", "deepspeed", "megatron", "nanotron", "torchtitan", "transformers")
# What each wing gives at an extension point, by its name there; ``pipeproof.extensions`` loads it when it is asked for.
GIVEN: Mapping[str, Mapping[str, str]] = {
    "adapters": {name: f"pipeproof.wings.adapters.{name}" for name in _ADAPTERS},
    "expectations": {"composed": "pipeproof.wings.composed:StageByStage"},
    "faulty_steps": {"mutate": "pipeproof.wings.mutate:PlantedStep"},
    "faults": {"specimens": "pipeproof.wings.specimens:CATALOGUE"},
    "whitebox": {name: f"pipeproof.wings.mutate:{name}" for name in ("LetPass", "Mutated", "mutate", "under_test")},
    "worlds": {"simulated": "pipeproof.wings.simulated:SimulatedWorld"},
}


def is_present(wing: str) -> bool:
    """Return true if ``wing`` is installed; commands offer its features only then."""
    return find_spec(f"{__name__}.{wing}") is not None
