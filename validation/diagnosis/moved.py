"""A part of a tensor that lies elsewhere in it, as where a shard was cut at the wrong place."""

from torch import Tensor

_LINES = ("rows", "columns")
_FEW = 2  # numbers in a line, or fewer: such may be alike by chance


def moved_along(seen: Tensor, due: Tensor) -> str:
    """In words, which rows or columns of ``due`` lie in the place of others in ``seen``; empty where none do."""
    if seen.shape != due.shape or seen.dim() not in (1, 2):
        return ""
    for dim, lines in enumerate(_LINES[: seen.dim()]):
        found = _moved(seen.transpose(0, dim), due.transpose(0, dim))
        if found is not None:
            start, stop, other = found
            own = f"its {lines} {other} to {other + stop - start - 1} in the place of {start} to {stop - 1}"
            return own if seen.dim() == 2 else own.replace(lines, "elements")
    return ""


def _moved(seen: Tensor, due: Tensor) -> tuple[int, int, int] | None:
    """From where to where lines differ, and where in ``due`` those begin that are there; None where none are."""
    apart = (seen != due).reshape(len(seen), -1).any(1).nonzero().flatten()
    if not len(apart):
        return None
    start, stop = int(apart[0]), int(apart[-1]) + 1
    part = seen[start:stop]
    if part.numel() <= _FEW or not part.any():
        return None
    for other in range(len(due) - len(part) + 1):
        if other != start and bool((due[other : other + len(part)] == part).all()):
            return start, stop, other
    return None
