"""Programs on a machine that has a device: one that is pretended, or the one that is named."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.sources import ROOT
from tests.support.warm_start import Ended, WarmStart, run_new

BOUND_S = 400.0  # of a busy machine
CHECKED = """
import os
import sys
from functools import partial

import torch
from torch import nn

from pipeproof import PipelineSchedule, SingleDevice, World, check_step


def loss_fn(output, target):
    # On rank 0, which has no loss of its own, those of the reference; a check puts back what it changes in this module.
    os.environ["PLACES"] = f"{os.environ.get('PLACES', '')} {output.device.type}"
    return nn.functional.mse_loss(output, target.to(output.device))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def steps(context, times="1", **given):
    stage = build()[2 * context.rank : 2 * context.rank + 2].to(context.device)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
    schedule = PipelineSchedule(
        kind="1F1B", n_microbatches=4, stages=[stage], optimizer=optimizer, pp_group=context.group,
        loss_fn=lambda output, target: int(times) * loss_fn(output, target),
    )
    draw = torch.Generator().manual_seed(0)
    data = [torch.randn(8, 16, generator=draw).to(context.device) for _ in range(4)]
    data = [(x, torch.zeros(8, 16).to(context.device)) for x in data]
    for _ in range(2):
        with check_step(stage, data, against=SingleDevice(build, loss_fn, **given)) as check:
            result = schedule.wrap(check.wrap).train_step(data, max_norm=0.1)
            check.report(losses=result.losses, loss=result.loss, norm=result.grad_norm)
    return f"{check.verdict}, by a reference on {', '.join({*os.environ['PLACES'].split()})}"


if __name__ == "__main__":
    with World(device=sys.argv[1], silent=True) as world:
        print(world.run(partial(steps, **dict(one.split("=") for one in sys.argv[2:])), ranks=2)[0])
"""


class Pretending:
    """A machine that has the pretended device, on which programs start with torch and the device imported."""

    def __init__(self) -> None:
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support" / "pretend")}
        self._warm = WarmStart(self._environment)

    def run(self, folder: Path, *arguments: str, order: str = "late") -> Ended:
        """A program there, and the device's order of doing what it is given."""
        return self._warm.run(folder, arguments, [{**self._environment, "PRETEND_ORDER": order}], bound_s=BOUND_S)

    def close(self) -> None:
        """No more programs."""
        self._warm.close()


def on_device(folder: Path, *arguments: str) -> Ended:
    """A program on this machine."""
    return run_new(sys.executable, folder, arguments, os.environ, bound_s=BOUND_S)


def trials(path: Path) -> dict[str, Any]:
    """What `pipeproof mutate --json` wrote of each fault."""
    return {one["specimen"]: one for one in json.loads(path.read_text())["specimens"]}
