"""A tensor's content in a few bytes, made where the tensor lies."""

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.observe.elements import bits, has_fp64
from pipeproof.core.observe.shards import held_here

ROW = 1 << 15  # words of 16 bits
LANES, _LARGEST = 4, 1 << 21
_AT_ONCE, _AT_ONCE_ON_DEVICE = 1 << 17, 1 << 25  # elements that are made wide at once, as many as caches hold


def digest(tensor: Tensor) -> bytes:
    """Equal for tensors of one shape and type that are equal bit for bit, and for others but by chance: 1 in 2^84.

    On every device it is the same. Of a long tensor, it is one of a few whole numbers for every 64 KB: four sums of its
    words of 16 bits, each multiplied by a random number below 2^21. No sum reaches 2^53, so that in fp64 all of them
    are exact, in whatever order they are made (a universal hash, as of Carter and Wegman).
    """
    found = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())  # processors have instructions for it
    content: Any = _short(bits(tensor.detach()).view(torch.uint8))
    found.update(content.numpy())
    return found.digest()


def contents(model: nn.Module) -> dict[str, bytes]:
    """The digest of every parameter by name, each name of a tied one too; of what this rank has of it."""
    return {name: digest(held_here(one)) for name, one in model.named_parameters(remove_duplicate=False)}


def wide_rows(flat: Tensor, row: int) -> Iterator[Tensor]:
    """It in fp64, in rows of so many elements, as many together as fit caches: a device has room for more.

    Each part lies where the one before it lay: to get new memory takes longer than all the sums.
    """
    whole = flat.view(-1, row)
    size = min(len(whole), max(1, (_AT_ONCE if flat.is_cpu else _AT_ONCE_ON_DEVICE) // row))
    wide = torch.empty(size, row, dtype=torch.float64, device=flat.device)
    for first in range(0, len(whole), max(1, size)):
        part = whole[first : first + size]
        yield wide[: len(part)].copy_(part)


def _short(content: Tensor) -> Tensor:
    """Bytes on the host, a copy: the very ones, or of more than a row's what stands for them."""
    if content.numel() <= 2 * ROW:
        return content.to("cpu", copy=True)
    content = content if has_fp64(content.device) else content.cpu()
    content = content.clone() if content.storage_offset() % 2 else content  # words begin at even places
    odd = content[content.numel() // 2 * 2 :]
    words = torch.cat([content, odd.new_zeros(1)]) if odd.numel() else content
    words = words.view(torch.int16)
    table, even = keys(words.device), words.numel() // ROW * ROW
    sums = [part @ table.T for part in wide_rows(words[:even], ROW)]
    rest = table[:, : words.numel() - even] @ words[even:].double()
    return torch.cat([*sums, rest[None]]).cpu().view(torch.uint8).reshape(-1)


@functools.cache
def keys(device: torch.device) -> Tensor:
    """The numbers that words are multiplied by (4, 32768), the same in every process."""
    generator = torch.Generator().manual_seed(ROW)
    drawn = torch.randint(_LARGEST, (ROW, LANES), generator=generator, device="cpu")
    return drawn.T.double().contiguous().to(device)  # products with rows are made several times as fast so
