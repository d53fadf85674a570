"""How torch is told to round products of fp32: by an older setting, and by newer ones for each device and sort.

The older one cannot be asked once a newer one says something else.
"""

import torch

from pipeproof.worlds.simulated.torch_inside import ROUNDINGS

Products = tuple[str | None, *tuple[str, ...]]


def products() -> Products:
    """The older setting, None where it cannot be asked, and the newer ones."""
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = None
    return older, *(ask() for ask, _ in ROUNDINGS)


def set_products(wanted: Products) -> None:
    """Make all of them what ``products`` said."""
    older, *newer = wanted
    if older is not None:
        torch.set_float32_matmul_precision(older)
    for (ask, put), name in zip(ROUNDINGS, newer, strict=True):
        if ask() != name:
            put(name)
