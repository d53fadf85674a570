"""What of a config is run here: a case, or a stack of primitives; and what a reader of its verdict must know.

What is said of a model of ours is run, or refused. A job that no machine here can run is run small, and what that
leaves out is said.
"""

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from pipeproof.cases.case import DTYPES, LOSSES, MODELS, Case, CaseError
from pipeproof.cases.config import LAYOUT, Config
from pipeproof.cases.primitives.sizes import BATCH, EACH, SEQUENCE
from pipeproof.cases.primitives.stacks import ONE_DEVICE, PIPELINE, Stack, StackError
from pipeproof.cases.runtimes import OWN
from pipeproof.core.measured import versions
from pipeproof.pipeline.layouts.transformer import MODELS as PUBLIC
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import known_are
from pipeproof.pipeline.sizes import MOST_LAYERS, counted, some

Work: TypeAlias = Case | Stack

STACKED = "decoder"  # the model of a config that is a stack as it stands
_RANKS = 4  # of a pipeline that stands for a longer one
_RECOMPUTE: Mapping[str, str] = MappingProxyType({"full": "recompute", "selective": "recompute-selective"})
_REPLICAS = ("ddp", "zero-1", "zero-2", "zero-3", "ep")  # primitives whose ranks have microbatches of their own
# What the step of a stack has. Another step can stand for a large job's; what carries it out is never left out.
_FIXED: Mapping[str, object] = MappingProxyType(
    {"dtype": DTYPES[0], "loss": LOSSES[0], "ragged": False, "unequal": False, "plan": ["train"]}
)
_CARRIED: Mapping[str, object] = MappingProxyType({"runtime": OWN, "options": [], "specimen": ""})
_BESIDE = [name for name in LAYOUT if name not in ("micro", "sequence")]  # those that a case is without


def work_of(config: Config) -> Work:
    """A stack where it has more than a pipeline, or is of a stack's model; else a case.

    Raises ``CaseError``, ``StackError`` or ``ScheduleError`` where that cannot be.
    """
    return stack_of(config) or case_of(config)


def case_of(config: Config) -> Case:
    """All, where it is of a model of ours, and a small step of the same kind otherwise.

    Raises ``CaseError``, or ``ScheduleError``, where that cannot be.
    """
    if config["model"] == STACKED:
        raise CaseError(
            f'{config.name}: "model": "{STACKED}" is run as a stack, and this is for cases: expected another model, '
            f"such as {MODELS[0]}"
        )
    if not _is_scaled(config):
        if not_run := _not_run(config):
            raise CaseError(
                f"{config.name}: {', '.join(not_run)}: a case has pp and dp alone; leave it out, or say "
                f'"model": "{STACKED}", which is run with more'
            )
        if data := _asked(config, "micro", "sequence"):
            raise CaseError(f"{config.name}: {', '.join(data)}: a case has sequences of its own; leave it out")
        return Case.of_config(config.data)
    ranks, virtual = min(config["pp"], _RANKS), config["virtual"]
    stages = counted("layers", ranks * virtual, most=MOST_LAYERS)
    sizes = {"pp": ranks, "dp": 1, "microbatches": ranks * _rounds(config), "split": [1] * stages}
    return Case.of_config({**config.data, **sizes, "model": MODELS[0], "dtype": DTYPES[0]})


def stack_of(config: Config) -> Stack | None:
    """The stack that is run of it; None where a case is.

    Each axis has at most two ranks, but as many as are said where the model is ``STACKED``. Raises ``StackError`` where
    that cannot be.
    """
    own, names = config["model"] == STACKED, _primitives(config)
    if not own and (not _is_scaled(config) or not set(names) - {PIPELINE}):
        return None
    sizes = {name: size if own else min(size, EACH) for name, size in names.items()}
    each = config["microbatches"] if own else sizes.get(PIPELINE, 1) * _rounds(config)
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
    _refuse_others(config, _all_of(stack, config) if own else _CARRIED)
    return stack


def _all_of(stack: Stack, config: Config) -> dict[str, object]:
    """What a decoder's step has, besides axes."""
    stages = stack.sizes.get(PIPELINE, 1) * stack.virtual
    return {
        **_FIXED,
        **_CARRIED,
        "virtual": stack.virtual,
        "split": [stack.layers // stages] * stages,
        "zero": config["zero"] if _replicas(config) > 1 else 0,
        "micro": BATCH,
        "sequence": SEQUENCE if config["sequence"] else 0,
    }


def _refuse_others(config: Config, had: Mapping[str, object]) -> None:
    """Raise ``StackError`` where it says something else than what a stack has."""
    for name, value in had.items():
        if name in config.data and config[name] != value:
            raise StackError(
                f"{config.name}: {name} is {json.dumps(config[name])}: expected {json.dumps(value)}, for a stack on "
                "these axes has no other; write that"
            )


def notes_of(config: Config, work: Work) -> list[str]:
    """What stands for what, what is not run, other versions."""
    found = []
    if _is_scaled(config) and config["model"] != STACKED:
        found.append(f"{config.name} is run small: {_small(config, work)} for {config['model']}")
        left = "; ".join(not_stacked(config)) if isinstance(work, Stack) else ", ".join(_not_run(config))
        found += [f"not run: {left}"] if left else []
    if (torch := versions()["torch"]) != (written := config["torch"] or torch):
        found.append(f"{config.name} was written with torch {written}; this is {torch}")
    return found


def not_stacked(config: Config) -> list[str]:
    """What it asks for and its stack has not, with the reason."""
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


def _small(config: Config, work: Work) -> str:
    """What is run, and of what."""
    if isinstance(work, Case):
        return (
            f"{work.ranks} of {config['pp']} pipeline ranks, {work.microbatches} of {config['microbatches']} "
            f"microbatches, {work.model} in {work.dtype}"
        )
    return (
        f"stack {work} for {', '.join(_asked(config, 'pp', 'dp', *_BESIDE)) or 'one device'}, {work.each} of "
        f"{config['microbatches']} microbatches, a decoder of {some(work.layers, 'layer')} in fp32"
    )


def _not_run(config: Config) -> list[str]:
    """What it asks for and no case has: ``tp 8``."""
    return _asked(config, *["dp"] * _is_scaled(config), *_BESIDE)


def _asked(config: Config, *names: str) -> list[str]:
    """What it says of these, where that is more than nothing."""
    return [f"{name} {config[name]}" for name in names if config[name] != LAYOUT.get(name, 1)]


def _is_scaled(config: Config) -> bool:
    """Whether its model is none of a case. Raises ``CaseError`` for a name that is nobody's.

    What advise writes has a sequence: its model may have been a file's.
    """
    model = config["model"]
    if "sequence" not in config.data and model not in (*MODELS, STACKED, *PUBLIC):
        ours = known_are(model, [*MODELS, STACKED])
        raise CaseError(f"{config.name}: unknown model {model!r}: {ours}, and those of pipeproof advise --list")
    return model not in MODELS


def _rounds(config: Config) -> int:
    """How often a small pipeline is filled."""
    return 2 if config["microbatches"] >= 2 * config["pp"] else 1


def _primitives(config: Config) -> dict[str, int]:
    """Those it asks for and a stack can have, in the order of a mesh, and their sizes; 0 of one that has none."""
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
    """Ranks that hold the same stage, and its same experts."""
    spread = config["cp"] if config["ep"] > 1 else 1  # experts are spread over these ranks, too
    return int(config["dp"] * spread // config["ep"])


def _has_tensors_in_shards(config: Config) -> bool:
    """Whether it asks for ZeRO-1 with what its optimizer does not take."""
    return bool(config["zero"] == 1 and max(config["tp"], config["sp"]) > 1)
