"""The debugger inside a rank: it shows the step's own names, and the step goes on."""

import socket
import threading
import time
from typing import IO

import torch
import torch.distributed as dist
from debug_here import debug_here
from my_pipeline import OneFOneB, build_model, loss_fn

from pipeproof.whitebox import WhiteBox


def connected(port: int) -> socket.socket:
    until = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("localhost", port))
        except OSError:
            assert time.monotonic() < until, "no rank waits for a debugger"
            time.sleep(0.02)


def talk(line: IO[str], said: list[str]) -> None:
    """Ask for a name of the step, and let it go on."""
    line.write("p mine\n")
    line.flush()
    while "43" not in "".join(said):
        said.append(line.readline())
    line.write("c\n")
    line.flush()


def test_a_rank_can_be_stopped_and_asked(whitebox: WhiteBox) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def my_step(model: torch.nn.Sequential, microbatches: list) -> tuple:
        mine = 42 + dist.get_rank()
        debug_here(rank=1, port=port)
        stage = model[2 * (mine - 42) :][:2]
        return stage, OneFOneB(stage, microbatches).step()

    said: list[str] = []

    def debug() -> None:
        with connected(port) as line, line.makefile("rw") as text:
            talk(text, said)
            done.wait(60)

    done, debugger = threading.Event(), threading.Thread(target=debug)
    debugger.start()
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(4)]
    verdict = whitebox.validate(my_step, reference=build_model, microbatches=data, ranks=2, loss_fn=loss_fn)
    done.set()
    debugger.join()
    verdict.raise_if_failed()
    assert "my_step()" in "".join(said)
