"""Run scripts one after the other in one process for each rank, for what costs is to start the ranks:

    torchrun --nproc-per-node 4 tests/support/in_turn.py RUNS FOLDER

RUNS is JSON: lists of a script and its options. Each rank writes into FOLDER, as JSON, what each run came to.
"""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist


def as_main(script: str, *options: str) -> tuple[int, str]:
    """The status of a script that this process runs, and what it prints. A process group is not made again."""
    said, status = io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", [script, *options]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(said),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            status = int(end.code or 0)
    return status, said.getvalue()


def main() -> None:
    """Every run on this rank, among the others."""
    runs, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    ended = [as_main(*run) for run in runs]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(ended))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
