"""Space: the cases that a campaign on a step of one's own may draw, and one case as a value and as text."""

import inspect
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import nn

from pipeproof.core.replicas import Replicas, ReplicasError
from pipeproof.pipeline.schedules import nearest
from pipeproof.pipeline.sizes import MOST_SEED, some
from pipeproof.whitebox.expectation import Expectation
from pipeproof.whitebox.task import WhiteBoxError, check_builds, check_module, name_of, show

Ranks = int | Sequence[int] | Mapping[str, int]
_VIRTUAL = "v"  # the option that says how many stages a rank has
_OWN = ("split", "dtype", "seed")  # what a step is given by these names, where it takes them


@dataclass(frozen=True)
class StepCase:
    """One run of a step: on which ranks, of how many microbatches with how many rows each, and what the step is given.

    split: how many layers each stage has; empty where the step is given none. dtype: None where none is named.
    """

    ranks: Ranks
    microbatches: int
    rows: tuple[int, ...]
    split: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def values(self) -> dict[str, str]:
        """Its values by name, as text; ``rows`` are one number where all microbatches have as many."""
        rows = self.rows[:1] if len({*self.rows}) == 1 else self.rows
        own = {"ranks": text_of(self.ranks), "microbatches": str(self.microbatches), "rows": text_of(rows)}
        own |= {"split": text_of(self.split)} if self.split else {}
        own |= {"dtype": text_of(self.dtype)} if self.dtype else {}
        return {**own, **{name: text_of(one) for name, one in self.options.items()}, "seed": str(self.seed)}

    @property
    def kinds(self) -> dict[str, str]:
        """What is counted of it: values of which there are few."""
        few = {name: value for name, value in self.values.items() if name not in ("rows", "split", "seed")}
        uneven = max(self.split, default=0) - min(self.split, default=0) > 1
        return few | ({"split": "uneven" if uneven else "even"} if self.split else {})

    @property
    def size(self) -> tuple[int, int, int, str]:
        """By this one case is smaller than another."""
        return len(_replicas(self.ranks).of), self.microbatches, sum(self.rows), str(self)

    def __str__(self) -> str:
        return shlex.join(f"{name}={value}" for name, value in self.values.items())

    def given(self, takes: Collection[str]) -> dict[str, Any]:
        """What a function is given by name of what it ``takes``."""
        own = {"dtype": self.dtype, "seed": self.seed}
        known = {name: one for name, one in own.items() if name in takes and one is not None}
        return {**({"split": self.split} if self.split else {}), **known, **self.options}


@dataclass(frozen=True)
class Campaign:
    """What ``whitebox.fuzz`` draws, and how long it goes on. Every word has a default.

    ranks: each as ``whitebox.validate`` takes them. microbatches: how many. rows: how many rows a microbatch may have.
    ragged: microbatches of one case may differ in rows. splits: deal layers unevenly to stages, too; the step gets
    ``split=``, the number of layers of each stage. True, or how many layers there are where the reference is no
    ``nn.Sequential``. None: as the step takes it. dtypes: types of parameters and data. options: what else the step is
    given, by name, from the plainest value on; an option ``v`` is how many stages a rank has. where: of a ``StepCase``,
    whether the step can do that. cases: how many are drawn, from ``seed``. seconds: after this long no further case
    begins. timeout_s: bounds one case, in seconds; then it is a hang. case: the one case to run, as a replay line
    has it.
    """

    ranks: Ranks | Iterable[Ranks] = (2, 4)
    microbatches: int | Iterable[int] = range(1, 9)
    rows: int | Iterable[int] = range(1, 5)
    ragged: bool = True
    splits: bool | int | None = None
    dtypes: Sequence[torch.dtype] = ()
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    where: Callable[[StepCase], bool] | None = None
    cases: int = 50
    seed: int = 0
    seconds: float = 300.0
    timeout_s: float = 30.0
    case: str = ""

    @classmethod
    def of(cls, given: "Campaign | None", words: Mapping[str, Any]) -> "Campaign":
        """What is ``given``, or the defaults, with ``words`` beside it. Raises ``WhiteBoxError`` for what is none."""
        if not isinstance(given, Campaign | None):
            raise WhiteBoxError(f"campaign is {show(given)}: expected a whitebox.Campaign, or its words beside it")
        known = [one.name for one in fields(cls)]
        for word in words:
            if word not in known:
                near = nearest(word, known).strip() or f"expected one of {', '.join(known)};"
                raise WhiteBoxError(f"{word}= is no word of a campaign: {near} what the step claims goes to contract=")
        return replace(given or cls(), **words)


@dataclass(frozen=True)
class Space:
    """What a campaign draws of a step, once each word is known to fit. ``layers``: how many are dealt; 0: none are."""

    campaign: Campaign
    ranks: Sequence[Ranks]
    microbatches: Sequence[int]
    rows: Sequence[int]
    layers: int
    takes: frozenset[str]

    @classmethod
    def of(cls, campaign: Campaign, step: Any, reference: Any) -> "Space":
        """Raises ``WhiteBoxError`` for a word that cannot be."""
        takes = names_taken(step, besides=2)
        for why in _complaints(campaign, step, takes):
            raise WhiteBoxError(why)
        ranks, many = _ranks(campaign.ranks), _numbers("microbatches", campaign.microbatches, "range(1, 9)")
        rows, layers = _numbers("rows", campaign.rows, "(1, 4)"), _layers(campaign, step, reference, takes)
        space = cls(campaign, ranks, many, rows, layers, takes)
        for one in ranks if layers else ():
            if (least := space.stages(one, min(campaign.options.get(_VIRTUAL, (1,))))) > layers:
                stages = f"{text_of(one)} ranks are {least} stages at least, and there are {some(layers, 'layer')}"
                raise WhiteBoxError(f"splits: {stages}: take fewer ranks=, a larger reference, or splits=False")
        return space

    def stages(self, ranks: Ranks, virtual: int) -> int:
        """How many stages there are, so many on each rank of a pipeline."""
        return len({*_replicas(ranks).places}) * virtual

    def below(self, case: StepCase) -> "Space | None":
        """The same on fewer ranks than ``case`` has; None where there are none."""
        fewer = [one for one in self.ranks if len(_replicas(one).of) < case.size[0]]
        return replace(self, ranks=fewer) if fewer else None

    def can(self, case: StepCase) -> bool:
        """Whether there is such a case: layers for each stage, and as many microbatches for each replica."""
        if case.split and len(case.split) > self.layers:
            return False
        if case.microbatches % _replicas(case.ranks).count:
            return False
        return self.campaign.where is None or bool(self.campaign.where(case))

    def parse(self, text: str) -> StepCase:
        """The case of a replay line. Raises ``WhiteBoxError`` for what is none of this campaign's."""
        try:
            given = dict(word.partition("=")[::2] for word in shlex.split(text))
        except ValueError as error:
            raise WhiteBoxError(
                f"case is {text!r}, which cannot be read: {error}; copy it from a replay line"
            ) from None
        campaign, options = self.campaign, self.campaign.options
        expected = ["ranks", "microbatches", "rows", "seed", *options, *(["split"] if self.layers else [])]
        expected += ["dtype"] if campaign.dtypes else []
        if {*given} != {*expected}:
            raise WhiteBoxError(f"case has {', '.join(given) or 'nothing'}: expected {', '.join(expected)}")
        many = _whole("microbatches", given["microbatches"])
        rows = [_whole("rows", one) for one in given["rows"].split(",")]
        split = tuple(_whole("split", one) for one in given["split"].split(",")) if self.layers else ()
        case = StepCase(
            _named("ranks", given["ranks"], self.ranks),
            many,
            tuple(rows * many if len(rows) == 1 else rows),
            split,
            _named("dtype", given["dtype"], campaign.dtypes) if campaign.dtypes else None,
            {name: _named(name, given[name], values) for name, values in options.items()},
            _whole("seed", given["seed"], least=0),
        )
        stages = self.stages(case.ranks, case.options.get(_VIRTUAL, 1))
        if len(case.rows) != many:
            raise WhiteBoxError(f"case has rows of {len(rows)} microbatches: expected one number, or {many}")
        if split and (len(split) != stages or sum(split) != self.layers):
            why = f"expected {some(stages, 'stage')} that have {some(self.layers, 'layer')} together"
            raise WhiteBoxError(f"case has split={given['split']}: {why}")
        return case


@st.composite
def step_cases(draw: st.DrawFn, space: Space) -> StepCase:
    """Any case of ``space``; it shrinks to few ranks and microbatches, even stages, and the first of all options.

    What is drawn in another number for other ranks and microbatches comes last, so that these shrink by themselves.
    """
    campaign = space.campaign
    ranks, many = draw(st.sampled_from(space.ranks)), draw(st.sampled_from(space.microbatches))
    options = {name: draw(st.sampled_from(list(values))) for name, values in campaign.options.items()}
    dtype = draw(st.sampled_from(list(campaign.dtypes))) if campaign.dtypes else None
    uneven, ragged = (draw(st.booleans()) if one else False for one in (space.layers, campaign.ragged))
    seed, row = draw(st.integers(0, 2**16)), st.sampled_from(space.rows)
    rows = (draw(row),) * many
    stages = space.stages(ranks, options.get(_VIRTUAL, 1)) if space.layers else 0
    ends = [space.layers * k // stages for k in range(stages + 1)] if stages else [0]
    split = draw(_sizes(space.layers, stages)) if uneven else tuple(max(1, b - a) for a, b in pairwise(ends))
    if ragged:
        rows = (rows[0], *(draw(row) for _ in rows[1:]))
    case = StepCase(ranks, many, rows, split, dtype, options, seed)
    if not space.can(case):
        reject()
    return case


@st.composite
def _sizes(draw: st.DrawFn, layers: int, stages: int) -> tuple[int, ...]:
    """How many of ``layers`` each stage has: at least one, also where they do not suffice."""
    sizes = list[int]()
    for left in range(stages - 1, 0, -1):
        sizes.append(draw(st.integers(1, max(1, layers - sum(sizes) - left))))
    return (*sizes, max(1, layers - sum(sizes)))


def names_taken(function: Any, *, besides: int) -> frozenset[str]:
    """What ``function`` takes by name, but for its first parameters; ``**`` where it takes any."""
    try:
        parameters = [*inspect.signature(function).parameters.values()][besides:]
    except (TypeError, ValueError):  # of what is not written in Python
        return frozenset()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    every = {"**"} if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters) else set()
    return frozenset({one.name for one in parameters if one.kind in by_name} | every)


def seeded(function: Any, seed: int) -> dict[str, int]:
    """The seed by name, where ``function`` takes one."""
    return {"seed": seed} if "seed" in names_taken(function, besides=0) else {}


def text_of(value: Any) -> str:
    """A value of a case as one word: a mesh is ``pp2,dp2``, and a list is its numbers."""
    if isinstance(value, Mapping):
        return ",".join(f"{axis}{size}" for axis, size in value.items())
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple | range):
        return ",".join(map(text_of, value))
    return name_of(value) if callable(value) else str(value)


def _complaints(campaign: Any, step: Any, takes: frozenset[str]) -> Iterator[str]:
    """What cannot be of the words that need no reference, in sentences."""
    if not callable(step):
        yield f"step is {step!r}: expected a function step(model, microbatches)"
    for name, least in (("cases", 1), ("seed", 0)):
        if type(value := getattr(campaign, name)) is not int or not least <= value <= MOST_SEED:
            yield f"{name} is {show(value)}: expected a whole number from {least} on, such as 50"
    if isinstance(campaign.seconds, bool) or not isinstance(campaign.seconds, int | float) or campaign.seconds <= 0:
        yield f"seconds is {show(campaign.seconds)}: expected a number above 0, such as 300"
    if campaign.where is not None and not callable(campaign.where):
        yield f"where is {show(campaign.where)}: expected a function of a case, or leave it out"
    options, dtypes = campaign.options, campaign.dtypes
    if not isinstance(options, Mapping):
        yield f"options is {show(options)}: expected names and their values, such as {{'v': (1, 2)}}"
    for name, values in options.items():
        if name in _OWN:
            yield f"options has {name!r}, which each case has without it: leave it out"
        if name not in takes and "**" not in takes:
            step_ = name_of(step)
            yield f"options has {name!r}, which {step_} does not take: leave it out, or let {step_} take it"
        if not isinstance(values, list | tuple | range) or not values:
            yield f"options has {name}={values!r}: expected a list of values, such as (1, 2)"
        if len({text_of(one) for one in values}) < len(values):
            yield f"options has {name}={values!r}: expected values whose texts differ"
    virtual = options.get(_VIRTUAL, (1,))
    if any(type(one) is not int or one < 1 for one in virtual):
        yield f"options has v={virtual!r}: expected numbers of stages of a rank, such as (1, 2)"
    known = isinstance(dtypes, list | tuple) and all(isinstance(one, torch.dtype) for one in dtypes)
    if not known or not all(one.is_floating_point for one in dtypes):
        yield f"dtypes is {dtypes!r}: expected types such as (torch.float32, torch.bfloat16)"


def _replicas(ranks: Ranks) -> Replicas:
    """Who is in which replica, where there are as many microbatches as ranks."""
    return Replicas.along(ranks, len(Replicas.along(ranks, 1).of))


def _ranks(given: Any) -> list[Ranks]:
    """The ranks to draw from, the fewest first."""
    every = [given] if isinstance(given, Mapping) or type(given) is int else given
    if not isinstance(every, Iterable) or isinstance(every, str) or not (found := [*every]):
        raise WhiteBoxError(f"ranks is {given!r}: expected numbers of ranks, such as (2, 4)")
    for one in found:
        try:
            _replicas(one).check()
        except ReplicasError as error:
            raise WhiteBoxError(
                f"{error}; name each as whitebox.validate takes it, such as ranks=(2, {{'pp': 2, 'dp': 2}})"
            ) from None
    return sorted(found, key=lambda one: len(_replicas(one).of))


def _numbers(name: str, given: Any, such: str) -> list[int]:
    every = [given] if type(given) is int else given
    found = [*every] if isinstance(every, Iterable) and not isinstance(every, str) else []
    if not found or any(type(one) is not int or one < 1 for one in found):
        raise WhiteBoxError(f"{name} is {given!r}: expected whole numbers from 1 on, such as {such}")
    return sorted({*found})


def _layers(campaign: Campaign, step: Any, reference: Any, takes: frozenset[str]) -> int:
    """How many layers are dealt to stages; 0 where the step is given no split."""
    splits, taken = campaign.splits, bool(takes & {"split", "**"})
    if splits is False or (splits is None and "split" not in takes):
        return 0
    if splits is not None and (type(splits) not in (bool, int) or splits < 1):
        raise WhiteBoxError(f"splits is {show(splits)}: expected True, False, or a number of layers, such as 8")
    if not taken:
        step_ = name_of(step)
        raise WhiteBoxError(f"splits is {splits}, and {step_} takes no split=: let it take one, or say splits=False")
    if type(splits) is int:
        return splits
    cure = "say how many layers there are, as splits=8, or splits=False"
    if isinstance(reference, Expectation):
        raise WhiteBoxError(f"reference is a {name_of(reference)}, whose layers are not known: {cure}")
    check_builds("reference", reference)
    check_module("reference returned", model := reference(**seeded(reference, campaign.seed)))
    if not isinstance(model, nn.Sequential):
        raise WhiteBoxError(f"reference gives a {name_of(model)}, and no nn.Sequential of layers: {cure}")
    return len(model)


def _named(name: str, text: str, values: Sequence[Any]) -> Any:
    found = {text_of(one): one for one in values}
    if text not in found:
        raise WhiteBoxError(f"case has {name}={text}: expected one of {' '.join(found)}, which the campaign draws from")
    return found[text]


def _whole(name: str, text: str, *, least: int = 1) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise WhiteBoxError(f"case has {text!r} in {name}: expected a whole number from {least} on")
    return int(text)
