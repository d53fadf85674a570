"""Tensor sizes in mismatches."""

import torch
from torch import Tensor

from pipeproof.core.mismatch import Size
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.tolerance import pieces


def sizes(observed: Tensor, expected: Tensor, base: Tensor | None) -> tuple[Size, Size]:
    """Describe two tensors in numbers: norms, factor and cosine."""
    shapes = tuple(observed.shape), tuple(expected.shape)
    if observed.shape != expected.shape:
        return Size(shapes[0]), Size(shapes[1])
    sums = torch.zeros(4, dtype=torch.float64)  # squares: observed, expected, start; then products
    for one, other, *origin in pieces(observed, expected, *([] if base is None else [base])):
        moved, wanted = (one - origin[0], other - origin[0]) if origin else (one, other)
        start = origin[0] if origin else torch.zeros_like(one[:0])
        sums += torch.stack(
            [(moved * moved).sum(), (wanted * wanted).sum(), (start * start).sum(), (moved * wanted).sum()]
        ).cpu()
    product = sums[3].item()
    observed_norm, wanted_norm, start_norm = sums[:3].sqrt().tolist()
    began, factor, cosine = None if base is None else start_norm, None, None
    if observed_norm and wanted_norm:  # not their product: a NaN would hide a zero
        factor, cosine = product / wanted_norm / wanted_norm, product / wanted_norm / observed_norm
    return Size(shapes[0], observed_norm, began, factor, cosine), Size(shapes[1], wanted_norm, began)


def brief_sizes(observed: Sketch, expected: Sketch, began: float | None) -> tuple[Size, Size]:
    """Describe two sketches, as ``sizes`` does."""
    if observed.shape != expected.shape:
        return Size(observed.shape), Size(expected.shape)
    cosine = observed.cosine(expected)
    factor = None if cosine is None else cosine * observed.norm / expected.norm
    return Size(observed.shape, observed.norm, began, factor, cosine), Size(expected.shape, expected.norm, began)
