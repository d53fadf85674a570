"""Give every rank every rank's numbers, over ordinary messages.

Not a collective: gloo's run on threads of their own, which abort the interpreter (observed with torch 2.13) when the
group is destroyed right after one, and a transport needs nothing beyond sending and receiving this way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeproof.pipeline.transport import Message, Transport

# Tags above those of links and of tied gradients: gloo admits up to 2**31 - 1.
_COUNT_TAG = 2**31 - 2
_VALUES_TAG = 2**31 - 1


def gather(transport: Transport, values: Sequence[float]) -> list[list[float]]:
    """Gather every rank's ``values`` (fp64, any count), by rank. Every rank must call it; rank 0 collects."""
    if transport.rank != 0:
        _send(transport, 0, values)
        transport.flush()
        return _split(_receive(transport, 0))
    rows = [list(values), *(_receive(transport, rank) for rank in range(1, transport.n_ranks))]
    for rank in range(1, transport.n_ranks):
        _send(transport, rank, [number for row in rows for number in (len(row), *row)])
    transport.flush()
    return rows


def _send(transport: Transport, peer: int, values: Sequence[float]) -> None:
    transport.send(Message("count of numbers shared", peer, _COUNT_TAG), _bytes([len(values)]))
    if values:
        transport.send(Message("numbers shared", peer, _VALUES_TAG), _bytes(values))


def _receive(transport: Transport, peer: int) -> list[float]:
    (count,) = _receive_losses(transport, Message("count of numbers shared", peer, _COUNT_TAG), 1)
    return _receive_losses(transport, Message("numbers shared", peer, _VALUES_TAG), int(count)) if count else []


def _receive_losses(transport: Transport, message: Message, count: int) -> list[float]:
    transport.post(message, count * torch.float64.itemsize)
    numbers: list[float] = transport.receive(message).cpu().view(torch.float64).tolist()
    return numbers


def _bytes(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(torch.uint8)


def _split(flat: Sequence[float]) -> list[list[float]]:
    """Split count, values, count, values, ... into rows."""
    rows, start = [], 0
    while start < len(flat):
        end = start + 1 + int(flat[start])
        rows.append(list(flat[start + 1 : end]))
        start = end
    return rows
