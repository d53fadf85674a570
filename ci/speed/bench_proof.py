"""Part k: a plan of the size of a 405B model is proven, as ``check --symbolic --mesh`` does it.

126 layers, the embedding and the output are 128 stages: 16 ranks with 8 each. As a script, ``bench_proof.py MESH``
proves one mesh around them and prints what that took as JSON: a process of its own, whose peak memory is this proof's.
"""

import json
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from time import perf_counter, process_time
from typing import Any

from bench_scale import peak_bytes
from bench_table import Row, Target

from pipeproof.commands.cli import main
from pipeproof.pipeline.mesh_file import read_axes

VIRTUAL, MICROBATCHES = 8, 512
MESHES = (
    "dp=128,pp={},tp=8",
    "dp_replicate=8,dp_shard=16,pp={},tp=8",
    "dp=1024,pp={},tp=8",
)
SECONDS, GIGABYTES = 60.0, 2.0


def measure(*, ranks: int, rounds: int) -> list[Row]:
    """Seconds of the whole command for each mesh around pipelines of ``ranks``: the quickest of ``rounds``."""
    return [_row(mesh, [_child(mesh) for _ in range(rounds)]) for mesh in (mesh.format(ranks) for mesh in MESHES)]


def _row(mesh: str, rounds: list[dict[str, Any]]) -> Row:
    found = min(rounds, key=lambda one: float(one["seconds"]))
    targets = [Target("seconds", found["seconds"], SECONDS), Target("GB", found["gigabytes"], GIGABYTES)]
    medians = {"seconds": found["seconds"], "of a processor": found["busy"], "peak GB": found["gigabytes"]}
    return Row(mesh, medians, targets, found["said"])


def _child(mesh: str) -> dict[str, Any]:
    command = [sys.executable, __file__, mesh]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def _proof(mesh: str) -> dict[str, Any]:
    plan = ["interleaved", "--virtual", str(VIRTUAL), "--microbatches", str(MICROBATCHES)]
    tied = f"0,{read_axes(mesh)['pp'] * VIRTUAL - 1}"
    told, began = StringIO(), perf_counter()
    with redirect_stdout(told):
        status = main(["check", *plan, "--symbolic", "--mesh", mesh, "--tied", tied])
    seconds, busy = perf_counter() - began, process_time()
    assert status == 0, f"a right plan is proven, but check said: {told.getvalue()}"
    said = next(line for line in told.getvalue().splitlines() if line.startswith("sums")).partition(": ")[2]
    return {"seconds": seconds, "busy": busy, "gigabytes": peak_bytes() / (1 << 30), "said": said}


if __name__ == "__main__":
    print(json.dumps(_proof(sys.argv[1])))
