"""Digests and additive sketches: tensor contents in a few numbers, computed on the tensor's device.

Both are keyed by element position, so that parts add up to the whole. The whole is cut into rows, each with at most
32768 16-bit words: some indices along one dimension, with all later dimensions. A part with any bounds splits into row
parts, and an element's key is its row's key times its place's key. Shapes: R rows, C words or numbers in a row.
"""

import functools
import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from pipeproof.core.observe.elements import bits, has_fp64, numbers, plain
from pipeproof.core.observe.shards import Bounds, local_tensor

ROW = 1 << 15  # 16-bit words
LANES, _LARGEST = 4, 1 << 21
_AT_ONCE, _AT_ONCE_ON_DEVICE = 1 << 17, 1 << 25  # elements converted at once, to fit caches
SHARES = 8
_PRIME = (1 << 31) - 1
_FIRST = torch.zeros(1, dtype=torch.int64, device="cpu")  # the first row's number
_FORM = struct.Struct(f"<{LANES}I")


def digest(tensor: Tensor) -> bytes:
    """Digest a tensor. Equal bits, shape and type give equal digests; others collide by chance: 1 in 2^80.

    All devices agree.
    """
    found = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())  # fast: processors have instructions for it
    flat = bits(tensor.detach())
    if flat.numel() * flat.element_size() > 2 * ROW:
        found.update(content_of(flat, flat.shape, ((0, len(flat)),)))
    else:
        found.update(flat.view(torch.uint8).to("cpu", copy=True).numpy().tobytes())
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


@functools.cache
def keys(device: torch.device) -> Tensor:
    """Return word factors (4, 32768), equal in all processes."""
    generator = torch.Generator().manual_seed(ROW)
    drawn = torch.randint(_LARGEST, (ROW, LANES), generator=generator, device="cpu")
    return drawn.T.double().contiguous().to(device)  # contiguous rows speed the products up several times


def add_digests(digests: Sequence[bytes]) -> bytes:
    """Combine part digests into the whole's digest."""
    every = [_FORM.unpack(one) for one in digests]
    return _FORM.pack(*(sum(lane) % _PRIME for lane in zip(*every, strict=True)))


@dataclass(frozen=True)
class _Rows:
    """Row parts from a tensor with ``shape`` as its whole.

    part (R, C): elements. rows: row numbers. inside: the part's places within a row, along its cut dimension and all
    later ones.
    """

    part: Tensor
    rows: Tensor
    inside: tuple[slice, ...]
    full: tuple[int, ...]  # a row's shape

    def of_table(self, table: Tensor, each: int) -> Tensor:
        """Select the part's columns (N, C) from a ``table`` with ``each`` entries per element."""
        count = math.prod(self.full) * each
        if self.part.shape[1] * each == count:
            return table[:, :count]
        whole = table[:, :count].view(len(table), *self.full, each)
        return whole[(slice(None), *self.inside)].reshape(len(table), -1)


def content_of(tensor: Tensor, shape: Sequence[int], bounds: Bounds) -> bytes:
    """Compute the digest (16 bytes) for a part at ``bounds``, on the tensor's own device.

    Equal bits in equal types give equal digests; others collide by chance: 1 in 2^80. Each word is multiplied by its
    place's random number, below 2^21, and each row by its own, in four sums modulo a prime. Row sums stay below 2^53,
    so fp64 is exact in any order (a universal hash, as by Carter and Wegman).
    """
    found = [0] * LANES
    for one in _cut(tensor, shape, bounds):
        flat = bits(one.part)
        words = flat if flat.element_size() == 1 else flat.view(torch.int16)
        table = one.of_table(keys(words.device), words.numel() // one.part.numel())
        if one.rows.numel() == 1:
            lanes = [int(a) * b for a, b in zip((table @ words.double()).tolist(), _factor(int(one.rows)), strict=True)]
        else:
            sums = torch.cat([part @ table.T for part in wide_rows(words, table.shape[1])])
            moved = sums.long().remainder(_PRIME) * _factors(one.rows).to(sums.device)
            lanes = moved.remainder(_PRIME).sum(0).tolist()
        found = [(a + b) % _PRIME for a, b in zip(found, lanes, strict=True)]
    return _FORM.pack(*found)


def shares_of(tensor: Tensor, shape: Sequence[int], bounds: Bounds) -> tuple[float, tuple[float, ...]]:
    """Compute the sum of squares, and signed sums over elements (8), for a part at ``bounds``.

    The signed sums form a count sketch, as by Charikar, Chen and Farach-Colton, with the tensor's norm. An element's
    share changes from row to row: no column stays in one.
    """
    square, found = 0.0, torch.zeros(SHARES, dtype=torch.float64, device="cpu")
    for one in _cut(tensor, shape, bounds):
        flat = numbers(one.part)
        table = one.of_table(_signs(flat.device), flat.numel() // one.part.numel())
        first = 0
        for part in wide_rows(flat, table.shape[1]):
            square += float(torch.linalg.vector_norm(part)) ** 2
            sums, rows = (part @ table.T).cpu(), one.rows[first : first + len(part)]
            first += len(part)
            if not int(one.rows[0]) and one.rows.numel() == 1:
                found += sums[0]  # the first row has no turned signs and no moved shares
            else:
                turns, places = _turns(rows)
                found += (sums * turns).gather(1, places).sum(0)
    return square, tuple((found * math.sqrt(SHARES)).tolist())


def _cut(tensor: Tensor, shape: Sequence[int], bounds: Bounds) -> Iterator[_Rows]:
    """Yield the rows that a part at ``bounds`` touches; incomplete rows come singly."""
    part = plain(tensor if has_fp64(tensor.device) else tensor.cpu())
    if not part.numel():
        return
    if not shape:
        part, shape, bounds = part[None], (1,), ((0, 1),)
    dim, step = _row(shape, max(1, part.element_size() // 2))
    if part.shape == tuple(shape) and step == shape[dim] and not dim:
        yield _Rows(part.reshape(1, -1), _FIRST, (), tuple(shape))
        return
    after = tuple(slice(*bound) for bound in bounds[dim + 1 :])
    before = torch.zeros(1, dtype=torch.int64, device="cpu")
    for (start, stop), length in zip(bounds[:dim], shape[:dim], strict=True):
        before = (before[:, None] * length + torch.arange(start, stop, device="cpu")).flatten()
    for start, stop in _align(*bounds[dim], step):
        piece = part.narrow(dim, start - bounds[dim][0], stop - start)
        at = torch.arange(start // step, max(start // step + 1, stop // step), device="cpu")
        rows = (before[:, None] * -(-shape[dim] // step) + at).flatten()
        inside = slice(0, step) if len(at) > 1 else slice(start % step, start % step + stop - start)
        yield _Rows(piece.reshape(len(rows), -1), rows, (inside, *after), (step, *shape[dim + 1 :]))


def _row(shape: Sequence[int], words: int) -> tuple[int, int]:
    """Return the cut dimension and its indices per row, for elements with ``words`` words."""
    inner = words
    for dim in reversed(range(len(shape))):
        if inner * shape[dim] > ROW or not dim:
            return dim, max(1, min(shape[dim], ROW // inner))
        inner *= shape[dim]
    raise AssertionError("a shape has a dimension")


def _align(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield a leading row fragment, whole rows, and a trailing fragment."""
    first, last = -(-start // step) * step, stop // step * step
    cuts = [start, stop] if first > last else [start, first, last, stop]
    yield from ((a, b) for a, b in pairwise(cuts) if a < b)


@functools.lru_cache(maxsize=64)
def _factor(row: int) -> list[int]:
    """Return ``_factors`` for one row."""
    found: list[int] = _factors(torch.tensor([row], device="cpu"))[0].tolist()
    return found


def _factors(rows: Tensor) -> Tensor:
    """Return row factors (R, 4)."""
    return _draw_factors(_power(rows), LANES, _PRIME - 1)[rows] + 1


def _turns(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return signs (R, 8) and share numbers (R, 8) per row; the first row keeps its own."""
    drawn = _draw_factors(_power(rows), SHARES + 1, 2 * SHARES)[rows]
    others = rows[:, None].sign()  # not the first row
    turns = 1 - 2 * (drawn[:, :SHARES] % 2) * others
    return turns, (torch.arange(SHARES, device="cpu") + drawn[:, SHARES:] * others) % SHARES


def _power(rows: Tensor) -> int:
    """Return a table length, a power of 2, beyond all ``rows``."""
    return 1 << int(rows.max()).bit_length()


@functools.lru_cache(maxsize=64)
def _draw_factors(lines: int, each: int, below: int) -> Tensor:
    """Return random integers (lines, each), equal in all processes; longer tables start alike."""
    generator = torch.Generator().manual_seed(ROW + each)
    return torch.randint(below, (lines, each), generator=generator, device="cpu")


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Return signs per place and share (8, 32768); eight adjacent places use eight shares."""
    generator = torch.Generator().manual_seed(SHARES * ROW)
    shares = torch.rand(ROW // SHARES, SHARES, generator=generator, device="cpu").argsort(1)
    shares[0] = torch.arange(SHARES, device="cpu")  # few elements fill the first shares
    signs = 1.0 - 2.0 * torch.randint(2, (ROW, 1), generator=generator, device="cpu").double()
    return (
        torch.zeros(ROW, SHARES, dtype=torch.float64)
        .scatter_(1, shares.reshape(-1, 1), signs)
        .T.contiguous()
        .to(device)
    )
