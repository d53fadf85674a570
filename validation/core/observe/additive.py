"""A tensor in sums over its elements, each keyed by where it lies in the whole: those of parts add up to the whole's.

The whole is cut into rows: of one dimension so many indices, and of all dimensions after it everything, that a row has
at most 32768 words of 16 bits. So a part of any bounds has parts of rows, and an element's key is a product of one of
its row and one of its place in the row. Shapes: R rows, C words or numbers of a row.
"""

import functools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pipeproof.core.observe.digest import LANES, ROW, keys, wide_rows
from pipeproof.core.observe.elements import bits, has_fp64, numbers, plain
from pipeproof.core.observe.shards import Bounds

SHARES = 8
_PRIME = (1 << 31) - 1
_FIRST = torch.zeros(1, dtype=torch.int64, device="cpu")  # the number of the first row
_FORM = struct.Struct(f"<{LANES}I")


def added_digests(digests: Sequence[bytes]) -> bytes:
    """The digest of the whole, by those of its parts."""
    every = [_FORM.unpack(one) for one in digests]
    return _FORM.pack(*(sum(lane) % _PRIME for lane in zip(*every, strict=True)))


@dataclass(frozen=True)
class _Rows:
    """Parts of rows, of a tensor whose whole has this ``shape``: of dimension ``dim`` each row has ``step`` indices.

    ``part`` (R, C) are the elements. ``rows``: the numbers of the rows. ``inside``: which places of a row these are, of
    dimension ``dim`` and all after it.
    """

    part: Tensor
    rows: Tensor
    inside: tuple[slice, ...]
    full: tuple[int, ...]  # the shape of a row

    def of_table(self, table: Tensor, each: int) -> Tensor:
        """The columns (N, C) of a ``table`` that has ``each`` of them for every element of a row."""
        count = math.prod(self.full) * each
        if self.part.shape[1] * each == count:
            return table[:, :count]
        whole = table[:, :count].view(len(table), *self.full, each)
        return whole[(slice(None), *self.inside)].reshape(len(table), -1)


def content_of(tensor: Tensor, shape: Sequence[int], bounds: Bounds) -> bytes:
    """The digest (16 bytes) of what lies at ``bounds`` of a whole of this ``shape``; it is made where the tensor lies.

    It is equal for parts of one type that are equal bit for bit, and for others but by chance: 1 in 2^80. Each word is
    multiplied by a random number of its place, and each row by one of its own, in four sums modulo a prime. No sum of a
    row reaches 2^53, so that in fp64 all of them are exact, in whatever order they are made.
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
    """The sum of squares of what lies there, and sums of its elements with signs, each in one of them (8).

    They are a count sketch, as of Charikar, Chen and Farach-Colton, and as long as the tensor is. Which of them an
    element is in changes from row to row: no column is in one alone.
    """
    square, found = 0.0, torch.zeros(SHARES, dtype=torch.float64, device="cpu")
    for one in _cut(tensor, shape, bounds):
        flat = numbers(one.part)
        table = one.of_table(_signs(flat.device), flat.numel() // one.part.numel())
        for first, part in _counted(wide_rows(flat, table.shape[1])):
            square += float(torch.linalg.vector_norm(part)) ** 2
            sums = (part @ table.T).cpu()
            if not int(one.rows[0]) and one.rows.numel() == 1:
                found += sums[0]  # the first row's have neither turns nor other places
                continue
            turns, places = _turns(one.rows[first : first + len(part)])
            found += (sums * turns).gather(1, places).sum(0)
    return square, tuple((found * math.sqrt(SHARES)).tolist())


def _counted(parts: Iterator[Tensor]) -> Iterator[tuple[int, Tensor]]:
    first = 0
    for part in parts:
        yield first, part
        first += len(part)


def _cut(tensor: Tensor, shape: Sequence[int], bounds: Bounds) -> Iterator[_Rows]:
    """The rows of which the part at ``bounds`` has something: those it has some indices of by themselves."""
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
    for start, stop in _aligned(*bounds[dim], step):
        piece = part.narrow(dim, start - bounds[dim][0], stop - start)
        at = torch.arange(start // step, max(start // step + 1, stop // step), device="cpu")
        rows = (before[:, None] * -(-shape[dim] // step) + at).flatten()
        inside = slice(0, step) if len(at) > 1 else slice(start % step, start % step + stop - start)
        yield _Rows(piece.reshape(len(rows), -1), rows, (inside, *after), (step, *shape[dim + 1 :]))


def _row(shape: Sequence[int], words: int) -> tuple[int, int]:
    """The dimension of which a row has some indices, and how many, where elements have so many ``words``."""
    inner = words
    for dim in reversed(range(len(shape))):
        if inner * shape[dim] > ROW or not dim:
            return dim, max(1, min(shape[dim], ROW // inner))
        inner *= shape[dim]
    raise AssertionError("a shape has a dimension")


def _aligned(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """What of a row begins there, whole rows, and what of a row ends there."""
    first, last = -(-start // step) * step, stop // step * step
    cuts = [start, stop] if first > last else [start, first, last, stop]
    yield from ((a, b) for a, b in pairwise(cuts) if a < b)


@functools.lru_cache(maxsize=64)
def _factor(row: int) -> list[int]:
    """As ``_factors``, of one row."""
    found: list[int] = _factors(torch.tensor([row], device="cpu"))[0].tolist()
    return found


def _factors(rows: Tensor) -> Tensor:
    """The numbers that the sums of these rows are multiplied by (R, 4)."""
    return _drawn(_power(rows), LANES, _PRIME - 1)[rows] + 1


def _turns(rows: Tensor) -> tuple[Tensor, Tensor]:
    """For these rows signs (R, 8), and which of a row's sums goes into which share (R, 8): of the first its own."""
    drawn = _drawn(_power(rows), SHARES + 1, 2 * SHARES)[rows]
    others = rows[:, None].sign()  # not the first row
    turns = 1 - 2 * (drawn[:, :SHARES] % 2) * others
    return turns, (torch.arange(SHARES, device="cpu") + drawn[:, SHARES:] * others) % SHARES


def _power(rows: Tensor) -> int:
    """Lines of a table that has all these rows: tables come in powers of 2."""
    return 1 << int(rows.max()).bit_length()


@functools.lru_cache(maxsize=64)
def _drawn(lines: int, each: int, below: int) -> Tensor:
    """Random whole numbers (lines, each), the same in every process; of more lines the first ones are these."""
    generator = torch.Generator().manual_seed(ROW + each)
    return torch.randint(below, (lines, each), generator=generator, device="cpu")


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """A sign for each place in a row, in one share of eight (8, 32768): of every eight places one in each share."""
    generator = torch.Generator().manual_seed(SHARES * ROW)
    shares = torch.rand(ROW // SHARES, SHARES, generator=generator, device="cpu").argsort(1)
    shares[0] = torch.arange(SHARES, device="cpu")  # a few elements are in the first ones
    signs = 1.0 - 2.0 * torch.randint(2, (ROW, 1), generator=generator, device="cpu").double()
    return (
        torch.zeros(ROW, SHARES, dtype=torch.float64)
        .scatter_(1, shares.reshape(-1, 1), signs)
        .T.contiguous()
        .to(device)
    )
