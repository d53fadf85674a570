"""What may go wrong in a step, one thing each, as a change in the model that a reference plays.

What passes between stages is changed on its way there or back; so is what modules inside a stage are given or put out,
where ranks share their work. Or the input that a stage keeps is overwritten before its backward.
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
from pipeproof.explain.model_beside import ModelBeside, Planted
from pipeproof.reference.data import Batch
from pipeproof.reference.outputs import module_of
from pipeproof.reference.passage import Passage, Values, passing

Change = Callable[[Tensor], Tensor]
Way = Callable[[Any], Any]  # of several tensors


@dataclass(frozen=True)
class Substitution:
    """One thing that may have gone wrong: a kind of cause and its words, and the model with it ``planted``.

    ``stages`` are those where it is; none: between all. ``forward``: losses follow from it. ``given``: the data of a
    microbatch where they are not its own.
    """

    kind: str
    text: str
    stages: tuple[int, ...]
    forward: bool
    planted: Planted = nullcontext
    given: Callable[[int], Batch] | None = None


def between(beside: ModelBeside, stages: int, dtype: torch.dtype) -> Iterator[Substitution]:
    """What may become of tensors of ``dtype`` between stages."""
    ends = [stage for stage in range(stages - 1) if beside.ends(stage)]
    for stage in ends:
        places, there, back = beside.ends(stage), (stage + 1,), (stage,)
        for kind, text, way in _changes("its input", places, dtype):
            yield Substitution(kind, text, there, True, _passing(beside, stage, there=way))
        for kind, text, way in _changes("its output gradient", [f"the gradient of {one}" for one in places], dtype):
            yield Substitution(kind, text, back, False, _passing(beside, stage, back=way))
        for name in narrower(dtype):
            both = _passing(beside, stage, there=_rounded(name), back=_rounded(name))
            text = f"its input and its input gradient are {name}-rounded"
            yield Substitution("rounded", text, there, True, both)
        for other in ends[: ends.index(stage)]:
            text = f"its input is that of stage {other + 1}"
            yield Substitution("wrong-message", text, there, True, _given_of(beside, stage, other))
        zero = _keeping(beside, stage + 1, torch.zeros_like)
        yield Substitution("overwritten", "its saved input is zero in its backward", there, False, zero)
    for name in narrower(dtype) if len(ends) > 1 else ():
        way = _rounded(name)
        for text, forward, ways in (
            ("forward", True, {"there": way}),
            ("backward", False, {"back": way}),
            ("both ways", True, {"there": way, "back": way}),
        ):
            every = partial(passing, passages=[_passage(beside, stage, **ways) for stage in ends])
            yield Substitution("rounded", f"what passes {text} between stages is {name}-rounded", (), forward, every)


def kept_otherwise(beside: ModelBeside, stage: int) -> Substitution:
    """Anything else in place of what ``stage`` keeps of its input: it shows which gradients depend on that."""
    text = "its saved input is overwritten before its backward"
    return Substitution("overwritten", text, (stage,), False, _keeping(beside, stage, _noise))


def of_data(batches: Sequence[Batch]) -> Iterator[Substitution]:
    """What may become of the inputs of microbatches before the first stage."""
    for k in (k for k, one in enumerate(batches[0].inputs) if isinstance(one, Tensor)):
        for other in (None, *range(len(batches))):
            kind, what = ("altered", "zero") if other is None else ("swapped-data", f"microbatch {other}'s")
            given = partial(_with_input, batches, k, other)
            yield Substitution(kind, f"its input {k} is {what}", (0,), True, given=given)


def inside(
    beside: ModelBeside, sites: Collection[Site], ranks: int, reaches: Callable[[Substitution], bool]
) -> Iterator[Substitution]:
    """What modules that share their work over ``ranks`` may be given or put out: a sum taken twice, a mean, nothing.

    Those alone of which one factor ``reaches`` what is wrong. What is alike in layers goes forward in all together.
    """
    points = [(f"the input of {text}", Passage(into=into)) for text, into in _alike(beside.modules, str)]
    outputs = _alike(beside.places, module_of)
    points += [(f"output {places[0].split()[1]} of {text}", Passage(places)) for text, places in outputs]
    together = {place for _, places in outputs if len(places) > 1 for place in places}
    sizes = [float(n) for n in range(2, ranks + 1) if ranks % n == 0]
    factors = (*sizes, *(1 / n for n in sizes))
    for text, point in points:
        modules = [*point.into, *map(module_of, point.places)]
        stages = tuple(sorted({s for s, name in sites if any(name.startswith(f"{one}.") for one in modules)}))

        times = partial(_multiplied, point, stages)
        if reaches(times("", 0.0, "back")):
            yield from (times(f"the gradient of {text}", factor, "back") for factor in (*factors, 0.0))
        for factor in factors if len(point.places) > 1 or not together.issuperset(point.places) else ():
            if reaches(times("", factor, "there", "back")):
                yield times(f"{text}, and its gradient,", factor, "there", "back")
                yield times(text, factor, "there")


def _multiplied(point: Passage, stages: tuple[int, ...], what: str, factor: float, *ways: str) -> Substitution:
    passage = Passage(point.places, into=point.into, **dict.fromkeys(ways, _times(factor)))
    planted = partial(passing, passages=[passage])
    return Substitution("computation", f"{what} is multiplied by {factor:g}", stages, "there" in ways, planted)


def _changes(whole: str, names: Sequence[str], dtype: torch.dtype) -> Iterator[tuple[str, str, Way]]:
    """Kinds, words and ways in which all that passes may be changed, or one of several."""
    several = names if len(names) > 1 else ()
    for text, k in ((whole, None), *((one, k) for k, one in enumerate(several))):
        for name in narrower(dtype):
            yield "rounded", f"{text} is {name}-rounded", _rounded(name, k)
        yield "uninitialised", f"{text} is zero", _each(torch.zeros_like, k)
    for k, other in permutations(range(len(several)), 2):
        yield "wrong-message", f"in place of {names[k]} comes {names[other]}", _in_place_of({k: other})
    for k, other in combinations(range(len(several)), 2):
        yield "wrong-message", f"{names[k]} and {names[other]} are exchanged", _in_place_of({k: other, other: k})


def _each(change: Change, concerned: int | None = None) -> Way:
    """``change`` of that one of several tensors, or of all."""
    return lambda values: tuple(
        one if one is None or concerned not in (None, k) else change(one) for k, one in enumerate(values)
    )


def _times(factor: float) -> Way:
    return _each(lambda one: one * factor)


def _rounded(name: str, concerned: int | None = None) -> Way:
    return _each(lambda one: one.to(ROUNDED_TO[name]).to(one.dtype), concerned)


def _in_place_of(others: Mapping[int, int]) -> Way:
    def way(values: Values) -> Values:
        made = tuple(values[others.get(k, k)] for k in range(len(values)))
        return made if _shapes(made) == _shapes(values) else values

    return way


def _shapes(values: Values) -> list[torch.Size | None]:
    return [None if one is None else one.shape for one in values]


def _passage(beside: ModelBeside, stage: int, **ways: Way) -> Passage:
    """Where ``stage`` ends: where several modules put that out, all at once into what comes after."""
    places = beside.ends(stage)
    into = beside.later(stage) if len({*map(module_of, places)}) > 1 else ()
    return Passage(places, into=into, **ways)


def _passing(beside: ModelBeside, stage: int, **ways: Way) -> Planted:
    return partial(passing, passages=[_passage(beside, stage, **ways)])


def _given_of(beside: ModelBeside, stage: int, other: int) -> Planted:
    """What passes the end of ``other``, an earlier stage, once more at the end of ``stage``."""
    held: list[Values] = []

    def hold(values: Values) -> Values:
        held[:] = [values]
        return values

    def again(values: Values) -> Values:
        return held[0] if held and _shapes(held[0]) == _shapes(values) else values

    return partial(passing, passages=[_passage(beside, other, there=hold), _passage(beside, stage, there=again)])


def _keeping(beside: ModelBeside, stage: int, change: Change) -> Planted:
    """``change`` of what ``stage`` is given, in place, once a gradient comes to its end."""
    held: list[Tensor] = []

    def hold(values: Values) -> Values:
        held[:] = [one.clone() for one in values if one is not None]
        return tuple(held)

    def overwrite(gradients: Values) -> Values:
        for one in held:
            one.data.copy_(change(one.data))
        return gradients

    return partial(passing, passages=[_passage(beside, stage - 1, there=hold), _passage(beside, stage, back=overwrite)])


def _noise(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)


def _with_input(batches: Sequence[Batch], k: int, other: int | None, m: int) -> Batch:
    """Microbatch m with input ``k`` of the ``other`` one, if that has its shape, or with zeros."""
    own = batches[m]
    given = torch.zeros_like(own.inputs[k]) if other is None else batches[other].inputs[k]
    same = given.shape == own.inputs[k].shape
    return replace(own, inputs=(*own.inputs[:k], given, *own.inputs[k + 1 :])) if same else own


def _alike(names: Iterable[str], module: Callable[[str], str]) -> list[tuple[str, tuple[str, ...]]]:
    """``names`` of what is alike in all layers, together; then each of several by itself. With words for them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in filter(module, names):
        number = name.split()[1] if " of " in name else ""
        groups.setdefault((re.sub(r"\b\d+\b", "*", module(name)), number), []).append(name)
    alike = [(text.removeprefix("*."), group) for (text, _), group in groups.items() if len(group) > 1]
    every = [(f"each {text}", tuple(group)) for text, group in alike]
    return [*every, *((module(name), (name,)) for name in filter(module, names))]
