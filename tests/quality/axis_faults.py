"""Faults of parallelism around and inside a stage, and variants that are right, by name; and a step that has one."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import axis_data
import axis_experts
import axis_planting
import axis_tensor
from axis_planting import NORMS, SOUND_NORMS, Plant, wrapped
from torch.distributed.device_mesh import DeviceMesh

from pipeproof.cases.primitives import stacked
from pipeproof.cases.primitives.stacked import Stack, run

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
    meshes: list[DeviceMesh] = []

    def noted(right: Any) -> Any:
        return lambda model, mesh: (meshes.append(mesh), right(model, mesh))[1]

    with ExitStack() as planted:
        planted.enter_context(wrapped(stacked, "stage_of", noted)())
        if not watched:
            planted.enter_context(patch.object(stacked, "watch", lambda module: module))
        for plant in PLANTS[fault]:
            planted.enter_context(plant())
        handed = run(model, microbatches, stack=stack)
        return replace(handed, grad_norm=axis_planting.right_norm(handed.modules, meshes[0]))
