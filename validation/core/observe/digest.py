"""Digests: tensor contents in a few bytes, computed on the tensor's device."""

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.observe.elements import bits, has_fp64
from pipeproof.core.observe.shards import local_tensor

ROW = 1 << 15  # 16-bit words
LANES, _LARGEST = 4, 1 << 21
_AT_ONCE, _AT_ONCE_ON_DEVICE = 1 << 17, 1 << 25  # elements converted at once, to fit caches


def digest(tensor: Tensor) -> bytes:
    """Digest a tensor. Equal bits, shape and type give equal digests; others collide by chance: 1 in 2^84.

    All devices agree. A long tensor becomes a few integers per 64 KB: four sums over 16-bit words, each multiplied by a
    random number below 2^21. Sums stay below 2^53, so fp64 is exact in any order (a universal hash, as by Carter and
    Wegman).
    """
    found = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())  # fast: processors have instructions for it
    content: Any = _short(bits(tensor.detach()).view(torch.uint8))
    found.update(content.numpy())
    return found.digest()


def contents(model: nn.Module) -> dict[str, bytes]:
    """Digest each parameter by name, including tied names; for sharded ones this rank's part."""
    return {name: digest(local_tensor(one)) for name, one in model.named_parameters(remove_duplicate=False)}


def wide_rows(flat: Tensor, row: int) -> Iterator[Tensor]:
    """Yield fp64 rows with ``row`` elements, in blocks that fit caches; devices take larger blocks.

    Each block reuses the previous block's memory: allocation would cost more than the sums.
    """
    whole = flat.view(-1, row)
    size = min(len(whole), max(1, (_AT_ONCE if flat.is_cpu else _AT_ONCE_ON_DEVICE) // row))
    wide = torch.empty(size, row, dtype=torch.float64, device=flat.device)
    for first in range(0, len(whole), max(1, size)):
        part = whole[first : first + size]
        yield wide[: len(part)].copy_(part)


def _short(content: Tensor) -> Tensor:
    """Return bytes on the host: a copy, or sums for long content."""
    if content.numel() <= 2 * ROW:
        return content.to("cpu", copy=True)
    content = content if has_fp64(content.device) else content.cpu()
    content = content.clone() if content.storage_offset() % 2 else content  # words start at even offsets
    odd = content[content.numel() // 2 * 2 :]
    words = torch.cat([content, odd.new_zeros(1)]) if odd.numel() else content
    words = words.view(torch.int16)
    table, even = keys(words.device), words.numel() // ROW * ROW
    sums = [part @ table.T for part in wide_rows(words[:even], ROW)]
    rest = table[:, : words.numel() - even] @ words[even:].double()
    return torch.cat([*sums, rest[None]]).cpu().view(torch.uint8).reshape(-1)


@functools.cache
def keys(device: torch.device) -> Tensor:
    """Return word factors (4, 32768), equal in all processes."""
    generator = torch.Generator().manual_seed(ROW)
    drawn = torch.randint(_LARGEST, (ROW, LANES), generator=generator, device="cpu")
    return drawn.T.double().contiguous().to(device)  # contiguous rows speed the products up several times
