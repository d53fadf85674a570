"""A recording without its loss scale: losses were multiplied by it, and gradients divided once all were added up."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeproof.diagnosis.combination import told_within
from pipeproof.diagnosis.likeness import factor_of
from pipeproof.diagnosis.limits import CLEARLY
from pipeproof.observers.recording import FLOWED, HANDED_ON, LATE, RECEIVED, Gradients, Point, Recording, Site

_FLOWS = (RECEIVED, FLOWED, HANDED_ON, LATE)
_Sums = Mapping[Site, Tensor | None]


def scale_in(recording: Recording, due: Mapping[Point, Sequence[Tensor | None]], gradients: _Sums) -> float:
    """What losses were multiplied by, if ``gradients`` were divided by it in the end, or tell nothing; or 1.

    ``due``: what the recording should hold at every point.
    """
    last = max(point.stage for point in due)
    flows = [point for point in due if point.stage == last and point.where == FLOWED]
    every = (_factor(recording.tensors.get(point, ()), due[point]) for point in flows)
    known = [one for one in every if one is not None]  # what else is wrong with a microbatch may hide it
    if len({*map(_told, known)}) != 1 or _told(known[0]) == 1:
        return 1.0
    divided = map(_told, _divisors(recording, gradients, known[0]))
    return known[0] if _told(known[0]) in divided or not any(map(_telling, gradients.values())) else 1.0


def unscaled(
    recordings: Mapping[int, Recording], due: Mapping[Point, Sequence[Tensor | None]], gradients: _Sums
) -> Mapping[int, Recording]:
    """``recordings`` of an update's operations, without the loss scale of the last, which ``gradients`` come of."""
    scale = scale_in(recordings[max(recordings)], due, gradients)
    return recordings if scale == 1.0 else {number: _without(one, scale) for number, one in recordings.items()}


def _without(recording: Recording, scale: float) -> Recording:
    """``recording``, in which nothing that flowed back, and no sum while it was added up, has the ``scale``."""
    tensors = {
        point: [None if one is None else one / scale for one in there] if point.where in _FLOWS else there
        for point, there in recording.tensors.items()
    }
    additions = {
        stage: [
            one._replace(before=None if one.before is None else _over(one.before, scale), after=_over(one.after, scale))
            for one in every
        ]
        for stage, every in recording.additions.items()
    }
    before = [_told(found) == _told(scale) for found in _divisors(recording, recording.summed, scale)]
    late = 2 * sum(before) <= len(before)  # they were divided after that
    summed = {site: one / scale if late and one is not None else one for site, one in recording.summed.items()}
    return replace(recording, tensors=tensors, additions=additions, summed=summed)


def _over(gradients: Gradients, scale: float) -> Gradients:
    return {name: None if one is None else one / scale for name, one in gradients.items()}


def _divisors(recording: Recording, gradients: _Sums, scale: float) -> Iterator[float | None]:
    """What each sum was divided by until it was among ``gradients``; None where that is not known.

    What is no multiple of it, as something was added besides, was divided by ``scale`` where it is about as small.
    """
    for stage, every in recording.additions.items():
        for name, one in every[-1].after.items() if every else ():
            there = gradients.get((stage, name))
            if one is not None and there is not None and _telling(one) and _telling(there):
                near = float(one.double().norm() / there.double().norm()) / scale
                yield _factor([one], [there]) or (scale if 1 / CLEARLY < near < CLEARLY else None)


def _telling(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any()) and bool(gradient.isfinite().all())


def _told(factor: float | None) -> float | None:
    """``factor`` without its sign, in so many digits as tell two apart."""
    return None if factor is None else float(f"{abs(factor):.3g}")


def _factor(seen: Iterable[Tensor | None], due: Iterable[Tensor | None]) -> float | None:
    """How many times ``due`` all of ``seen`` is, as one tensor; None where it is no multiple."""
    both = zip(seen, due, strict=False)
    pairs = [(one, two) for one, two in both if one is not None and two is not None and one.shape == two.shape]
    if not pairs:
        return None
    one, two = (torch.cat([x.detach().flatten().double().cpu() for x in column]) for column in zip(*pairs, strict=True))
    return factor_of(one, two, max(told_within(x.dtype) for x, _ in pairs))
