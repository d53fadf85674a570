"""The stack for a config with a decoder: the whole configuration, scaled down from a large job."""

import json
import math
from collections.abc import Mapping
from types import MappingProxyType

from pipeproof.own.case import DTYPES, LOSSES
from pipeproof.own.config import STACKED, Config
from pipeproof.own.runtimes import OWN
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.wings.primitives.stacks import BATCH, EACH, ONE_DEVICE, PIPELINE, SEQUENCE, Stack, StackError

_RECOMPUTE: Mapping[str, str] = MappingProxyType({"full": "recompute", "selective": "recompute-selective"})
_REPLICAS = ("ddp", "zero-1", "zero-2", "zero-3", "ep")  # primitives with separate microbatches on each rank
# What the step of a stack has. Another step can stand for a large job's; what carries it out is never left out.
_FIXED: Mapping[str, object] = MappingProxyType(
    {"dtype": DTYPES[0], "loss": LOSSES[0], "ragged": False, "unequal": False, "plan": ["train"]}
)
_CARRIED: Mapping[str, object] = MappingProxyType({"runtime": OWN, "options": [], "specimen": ""})


def stack_of(config: Config) -> Stack | None:
    """Return the stack for a config; None if a case fits.

    Axes are limited to two ranks, except for a ``STACKED`` model, which keeps its sizes. Raises ``StackError`` if
    impossible.
    """
    own, names = config["model"] == STACKED, _primitives(config)
    if not own and (not config.is_scaled or not set(names) - {PIPELINE}):
        return None
    sizes = {name: size if own else min(size, EACH) for name, size in names.items()}
    each = config["microbatches"] if own else sizes.get(PIPELINE, 1) * config.rounds
    try:
        stack = Stack.parse(
            ",".join(f"{name}={size}" if size else name for name, size in sizes.items()) or ONE_DEVICE,
            schedule=config["schedule"],
            virtual=config["virtual"] if PIPELINE in sizes else None,
            microbatches=each * math.prod(sizes.get(name, 1) for name in _REPLICAS),
            seed=config["seed"],
        )
    except (StackError, ScheduleError) as error:
        raise StackError(f"{config.name}: {error}") from None
    had = _CARRIED
    if own:
        stages = stack.sizes.get(PIPELINE, 1) * stack.virtual
        had = {
            **_FIXED,
            **_CARRIED,
            "virtual": stack.virtual,
            "split": [stack.layers // stages] * stages,
            "zero": config["zero"] if _replicas(config) > 1 else 0,
            "micro": BATCH,
            "sequence": SEQUENCE if config["sequence"] else 0,
        }
    for name, value in had.items():
        if name in config.data and config[name] != value:
            raise StackError(
                f"{config.name}: {name} is {json.dumps(config[name])}: expected {json.dumps(value)}, for a stack on "
                "these axes has no other; write that"
            )
    return stack


def not_stacked(config: Config) -> list[str]:
    """List settings that the stack lacks, with reasons."""
    found = [
        f"{name} {json.dumps(config[name])}, for a stack has {json.dumps(value)}"
        for name, value in _FIXED.items()
        if name != "dtype" and name in config.data and config[name] != value
    ]
    if config["virtual"] > 1 and config["pp"] == 1:
        found.append(f"virtual {config['virtual']}, for there is no pipeline")
    if config["zero"] and _replicas(config) == 1:
        found.append(
            f"zero {config['zero']}, for no two replicas hold the same {'experts' * (config['ep'] > 1) or 'stage'}"
        )
    elif _has_tensors_in_shards(config):
        found.append("zero 1, for torch's ZeroRedundancyOptimizer takes no DTensors, which tp and sp make")
    if config["ep"] > 1 and config["cp"] > 1:
        found.append(f"cp {config['cp']}, for with experts another model is trained than on one device")
    return found


def _primitives(config: Config) -> dict[str, int]:
    """Return requested primitives that a stack can have, in mesh order, with sizes; 0 without axes."""
    own = config["model"] == STACKED
    in_shards = config["zero"] > 0 and (own or not _has_tensors_in_shards(config))
    sizes = {
        PIPELINE: config["pp"],
        f"zero-{config['zero']}" if in_shards else "ddp": _replicas(config),
        "ep": config["ep"],
        "cp": config["cp"] if own or config["ep"] == 1 else 1,
        "tp": config["tp"],
        "sp": config["sp"],
    }
    again = _RECOMPUTE.get(config["recompute"])
    return {name: size for name, size in sizes.items() if size > 1} | ({again: 0} if again else {})


def _replicas(config: Config) -> int:
    """Return the number of ranks with the same stage and the same experts."""
    spread = config["cp"] if config["ep"] > 1 else 1  # experts are spread over these ranks, too
    return int(config["dp"] * spread // config["ep"])


def _has_tensors_in_shards(config: Config) -> bool:
    """True if ZeRO-1 shards tensors that its optimizer rejects."""
    return bool(config["zero"] == 1 and max(config["tp"], config["sp"]) > 1)
