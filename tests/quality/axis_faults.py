"""Faults of parallelism around and inside a stage, and variants that are right, by name; and a step that has one."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import axis_data
import axis_experts
import axis_tensor
from axis_planting import NORMS, SOUND_NORMS, Plant

from pipeproof.wings.primitives import stacked
from pipeproof.wings.primitives.stacked import run
from pipeproof.wings.primitives.stacks import Stack

SOUND: Mapping[str, Sequence[Plant]] = {**axis_data.SOUND, **axis_tensor.SOUND, **axis_experts.SOUND, **SOUND_NORMS}
PLANTS: Mapping[str, Sequence[Plant]] = {
    "": (),
    **SOUND,
    **axis_data.FAULTS,
    **axis_tensor.FAULTS,
    **axis_experts.FAULTS,
    **NORMS,
}


def step(model: Any, microbatches: Sequence[Any], *, stack: Stack, fault: str, watched: bool) -> Any:
    """One step of ``stack`` with ``fault``; empty: a right one."""
    with ExitStack() as planted:
        if not watched:
            planted.enter_context(patch.object(stacked, "watch", lambda module: module))
        for plant in PLANTS[fault]:
            planted.enter_context(plant())
        return run(model, microbatches, stack=stack)
