"""A debugger inside a rank."""

import pdb
import socket
import sys

import torch.distributed as dist


def debug_here(rank: int, port: int = 4000) -> None:
    """Stop this rank where it is called, until somebody connects with ``nc localhost 4000``."""
    if dist.get_rank() == rank:
        with socket.create_server(("localhost", port)) as server:
            talk = server.accept()[0].makefile("rw")
        pdb.Pdb(stdin=talk, stdout=talk).set_trace(sys._getframe(1))
