"""Possible faults in a step, one by one, as changes in the reference's model.

A tensor between stages changes on its way there or back; so does an input or output of modules inside a stage whose
ranks share their work. Or the stored input of a stage is overwritten before its backward.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, permutations
from typing import Any

import torch
from torch import Tensor

from pipeproof.core.observe.likeness import ROUNDED_TO, narrower
from pipeproof.core.observe.recording import Site
from pipeproof.explain.played import ModelBeside, Planted
from pipeproof.reference.data import Batch
from pipeproof.reference.outputs import module_of
from pipeproof.reference.passage import Passage, Values, passing

Change = Callable[[Tensor], Tensor]
Way = Callable[[Any], Any]  # of several tensors


@dataclass(frozen=True)
class Substitution:
    """One possible fault: a kind of cause and its words, and the model with it ``planted``.

    ``stages``: its places; none: between all. ``forward``: losses follow from it. ``given``: the data of a microbatch,
    if not its own.
    """

    kind: str
    text: str
    stages: tuple[int, ...]
    forward: bool
    planted: Planted = nullcontext
    given: Callable[[int], Batch] | None = None


def between(beside: ModelBeside, stages: int, dtype: torch.dtype) -> Iterator[Substitution]:
    """Yield faults in ``dtype`` tensors between stages."""
    ends = [stage for stage in range(stages - 1) if beside.ends(stage)]
    for stage in ends:
        places, there, back = beside.ends(stage), (stage + 1,), (stage,)
        for kind, text, way in _changes("its input", places, dtype):
            yield Substitution(kind, text, there, True, _planted(_passage(beside, stage, there=way)))
        for kind, text, way in _changes("its output gradient", [f"the gradient of {one}" for one in places], dtype):
            yield Substitution(kind, text, back, False, _planted(_passage(beside, stage, back=way)))
        for name in narrower(dtype):
            both = _planted(_passage(beside, stage, there=_round(name), back=_round(name)))
            text = f"its input and its input gradient are {name}-rounded"
            yield Substitution("rounded", text, there, True, both)
        for other in ends[: ends.index(stage)]:
            text = f"its input is that of stage {other + 1}"
            yield Substitution("wrong-message", text, there, True, _repeat_passage(beside, stage, other))
        zero = _keeping(beside, stage + 1, torch.zeros_like)
        yield Substitution("overwritten", "its saved input is zero in its backward", there, False, zero)
    for name in narrower(dtype) if len(ends) > 1 else ():
        way = _round(name)
        for text, forward, ways in (
            ("forward", True, {"there": way}),
            ("backward", False, {"back": way}),
            ("both ways", True, {"there": way, "back": way}),
        ):
            every = _planted(*(_passage(beside, stage, **ways) for stage in ends))
            yield Substitution("rounded", f"what passes {text} between stages is {name}-rounded", (), forward, every)


def change_kept(beside: ModelBeside, stage: int) -> Substitution:
    """Put noise into the stored input on ``stage``: it shows the dependent gradients."""
    text = "its saved input is overwritten before its backward"
    return Substitution("overwritten", text, (stage,), False, _keeping(beside, stage, _noise))


def of_data(batches: Sequence[Batch]) -> Iterator[Substitution]:
    """Yield faults in microbatch inputs before the first stage."""
    for k in (k for k, one in enumerate(batches[0].inputs) if isinstance(one, Tensor)):
        for other in (None, *range(len(batches))):
            kind, what = ("altered", "zero") if other is None else ("swapped-data", f"microbatch {other}'s")
            given = partial(_with_input, batches, k, other)
            yield Substitution(kind, f"its input {k} is {what}", (0,), True, given=given)


def _with_input(batches: Sequence[Batch], k: int, other: int | None, m: int) -> Batch:
    """Microbatch m with input ``k`` from ``other``, if the shapes match, or with zeros."""
    own = batches[m]
    given = torch.zeros_like(own.inputs[k]) if other is None else batches[other].inputs[k]
    same = given.shape == own.inputs[k].shape
    return replace(own, inputs=(*own.inputs[:k], given, *own.inputs[k + 1 :])) if same else own


def inside(
    beside: ModelBeside, sites: Collection[Site], ranks: int, reaches: Callable[[Substitution], bool]
) -> Iterator[Substitution]:
    """Faults inside modules that share their work over ``ranks``: a sum taken twice, a mean, nothing.

    Only modules for which one factor ``reaches`` the wrong results. Forwards of repeated layers change all together.
    """
    points = [(f"the input of {text}", Passage(into=into)) for text, into in _group_alike(beside.modules, str)]
    outputs = _group_alike(beside.places, module_of)
    points += [(f"output {places[0].split()[1]} of {text}", Passage(places)) for text, places in outputs]
    together = {place for _, places in outputs if len(places) > 1 for place in places}
    sizes = [float(n) for n in range(2, ranks + 1) if ranks % n == 0]
    factors = (*sizes, *(1 / n for n in sizes))
    for text, point in points:
        modules = [*point.into, *map(module_of, point.places)]
        stages = tuple(sorted({s for s, name in sites if any(name.startswith(f"{one}.") for one in modules)}))

        times = partial(_multiply, point, stages)
        if reaches(times("", 0.0, "back")):
            yield from (times(f"the gradient of {text}", factor, "back") for factor in (*factors, 0.0))
        for factor in factors if len(point.places) > 1 or not together.issuperset(point.places) else ():
            if reaches(times("", factor, "there", "back")):
                yield times(f"{text}, and its gradient,", factor, "there", "back")
                yield times(text, factor, "there")


def _multiply(point: Passage, stages: tuple[int, ...], what: str, factor: float, *ways: str) -> Substitution:
    way = _each(lambda one: one * factor)
    planted = _planted(Passage(point.places, into=point.into, **dict.fromkeys(ways, way)))
    return Substitution("computation", f"{what} is multiplied by {factor:g}", stages, "there" in ways, planted)


def _changes(whole: str, names: Sequence[str], dtype: torch.dtype) -> Iterator[tuple[str, str, Way]]:
    """Yield kinds, words and changes for all crossing tensors, or one among several."""
    several = names if len(names) > 1 else ()
    for text, k in ((whole, None), *((one, k) for k, one in enumerate(several))):
        for name in narrower(dtype):
            yield "rounded", f"{text} is {name}-rounded", _round(name, k)
        yield "uninitialised", f"{text} is zero", _each(torch.zeros_like, k)
    for k, other in permutations(range(len(several)), 2):
        yield "wrong-message", f"in place of {names[k]} comes {names[other]}", _in_place_of({k: other})
    for k, other in combinations(range(len(several)), 2):
        yield "wrong-message", f"{names[k]} and {names[other]} are exchanged", _in_place_of({k: other, other: k})


def _each(change: Change, concerned: int | None = None) -> Way:
    """Apply ``change`` to a numbered tensor, or to all."""
    return lambda values: tuple(
        one if one is None or concerned not in (None, k) else change(one) for k, one in enumerate(values)
    )


def _round(name: str, concerned: int | None = None) -> Way:
    return _each(lambda one: one.to(ROUNDED_TO[name]).to(one.dtype), concerned)


def _in_place_of(others: Mapping[int, int]) -> Way:
    def way(values: Values) -> Values:
        made = tuple(values[others.get(k, k)] for k in range(len(values)))
        return made if _shapes(made) == _shapes(values) else values

    return way


def _shapes(values: Values) -> list[torch.Size | None]:
    return [None if one is None else one.shape for one in values]


def _passage(beside: ModelBeside, stage: int, **ways: Way) -> Passage:
    """The crossing at the end of ``stage``: with several output modules, all at once into the next."""
    places = beside.ends(stage)
    into = beside.later(stage) if len({*map(module_of, places)}) > 1 else ()
    return Passage(places, into=into, **ways)


def _planted(*passages: Passage) -> Planted:
    return partial(passing, passages=passages)


def _repeat_passage(beside: ModelBeside, stage: int, other: int) -> Planted:
    """Repeat an earlier stage's crossing at the end of ``stage``."""
    held: list[Values] = []

    def hold(values: Values) -> Values:
        held[:] = [values]
        return values

    def again(values: Values) -> Values:
        return held[0] if held and _shapes(held[0]) == _shapes(values) else values

    return _planted(_passage(beside, other, there=hold), _passage(beside, stage, there=again))


def _keeping(beside: ModelBeside, stage: int, change: Change) -> Planted:
    """Apply ``change`` to the stage's input, in place, after a gradient reaches its end."""
    held: list[Tensor] = []

    def hold(values: Values) -> Values:
        held[:] = [one.clone() for one in values if one is not None]
        return tuple(held)

    def overwrite(gradients: Values) -> Values:
        for one in held:
            one.data.copy_(change(one.data))
        return gradients

    return _planted(_passage(beside, stage - 1, there=hold), _passage(beside, stage, back=overwrite))


def _noise(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)


def _group_alike(names: Iterable[str], module: Callable[[str], str]) -> list[tuple[str, tuple[str, ...]]]:
    """Group ``names`` in repeated layers; then each alone, with words for them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in filter(module, names):
        number = name.split()[1] if " of " in name else ""
        groups.setdefault((re.sub(r"\b\d+\b", "*", module(name)), number), []).append(name)
    alike = [(text.removeprefix("*."), group) for (text, _), group in groups.items() if len(group) > 1]
    every = [(f"each {text}", tuple(group)) for text, group in alike]
    return [*every, *((module(name), (name,)) for name in filter(module, names))]
