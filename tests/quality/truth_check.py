"""A run and its truth, and a verdict held against it: each sentence is true, false, or known to nobody."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from truth_claims import COUNTED, GARBLED, OF_KIND, SPEAKS_OF, THINGS, Claim, claims
from truth_models import COUNT, RANKS

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox

# Kinds that give the same gradients: where these are all there is, each may stand as the alternative of the other.
_SAME_GRADIENTS = frozenset({"swapped-activations", "swapped-gradients"})
# What nobody knows apart who sees no messages, but what stages are given.
_ARRIVED = frozenset({"mispaired", "wrong-message"})
_ZEROS = frozenset({"uninitialised", "dropped"})  # came back: they were sent, or what was sent had not come
_ZEROS_SENT = frozenset({"uninitialised", "wrong-message"})  # came in: as well
_TARGETS = frozenset({"computation", "swapped-data"})  # of a loss, whose target nobody sees
_ORDERS = frozenset({"wrong-message", "computation"})  # of inputs: they came so, or so the stage takes them

_TIMES = frozenset({"doubled", "scale", "unequal-weights"})  # which sums do not tell: added again, or multiplied

# How a verdict names what is wrong: what it is, at its place; what it is, at another; nothing; something else.
# Of a run that is right: silent, or with an alarm.
Naming = Literal["right", "elsewhere", "unknown", "wrong", "silent", "alarm", "needless"]


@dataclass(frozen=True)
class Truth:
    """What is true of a run.

    ``kinds`` are the kinds that a fault is, ``alike`` those that final gradients alone may tell no better; both empty
    for a run that is right. ``wrong`` are the things that are wrong in it. ``ranks`` and ``stages`` are where the fault
    is; empty: everywhere, or not asked. ``somewhere``: to say "everywhere" is as true. ``between``: it is one fault
    between two stages, so that either may be named. ``microbatches`` are those concerned; empty: all, or not asked.
    ``parameter`` is a pattern. ``affected`` are the stages at which anything shows; None: not asked. ``factors`` are
    true ones. ``also`` are faults that the run has besides, as one of two halves. ``faint``: rounding may do as
    much, so that unknown is an answer.
    """

    kinds: tuple[str, ...] = ()
    wrong: frozenset[str] = frozenset()
    ranks: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    microbatches: tuple[int, ...] = ()
    parameter: str = ""
    alike: tuple[str, ...] = ()
    factors: tuple[float, ...] = ()
    affected: tuple[int, ...] | None = None
    somewhere: bool = False
    between: bool = False
    also: "tuple[Truth, ...]" = ()
    faint: bool = False

    def __post_init__(self) -> None:
        assert self.wrong <= THINGS, f"{sorted(self.wrong - THINGS)} are no things"

    @property
    def all_wrong(self) -> frozenset[str]:
        """What is wrong, and what the kind of fault itself is called."""
        return self.wrong | {OF_KIND[kind] for kind in self.kinds[:1] if kind in OF_KIND}


class Counts(NamedTuple):
    """What a run has of each."""

    ranks: int
    stages: int
    microbatches: int
    replicas: int = 1


COUNTS = Counts(RANKS, RANKS, COUNT)
RIGHT = Truth()


@dataclass(frozen=True)
class Run:
    """A foreign step and its truth; ``given``: what ``by`` is told beside it. ``ways``: watched or not."""

    title: str
    step: Callable[..., Any]
    truth: Truth = RIGHT
    given: Mapping[str, Any] = field(default_factory=dict)
    counts: Counts = COUNTS
    ways: tuple[bool, ...] = (True, False)
    by: Callable[..., Verdict] = lambda whitebox, step, **given: whitebox.validate(step, **given)

    def verdict(self, whitebox: WhiteBox, *, watched: bool) -> Verdict:
        """What is said of it."""
        return self.by(whitebox, partial(self.step, watched=watched), **self.given)


class False_(NamedTuple):
    """A sentence that is not true, and why."""

    role: str
    text: str
    why: str


@dataclass(frozen=True)
class Checked:
    """A verdict that was checked. ``garbled`` are sentences that end or begin with nothing, ``downstream`` places that
    are right but show only what followed."""

    verdict: str
    naming: Naming
    false: tuple[False_, ...] = ()
    garbled: tuple[str, ...] = ()
    downstream: str = ""
    named: str = ""
    sentences: int = 0
    faint: bool = False

    @property
    def caught(self) -> bool:
        """Whether something is said to be wrong, or left open where rounding may do as much."""
        return self.verdict == "fail" or bool(self.named) or (self.faint and self.verdict == "unknown")


def check(verdict: Verdict, truth: Truth, counts: Counts, *, watched: bool = True) -> Checked:
    """Hold each sentence of ``verdict`` against ``truth``. ``watched``: more was observed than final gradients."""
    found = list(claims(verdict))
    if not watched:
        truth = from_gradients(truth)
    false = [False_(claim.role, claim.text, why) for claim in found for why in _reasons(claim, truth, counts)]
    false += list(_alternatives(found, truth))
    false += list(_against_judge(found, verdict))
    false += list(_untold(found, truth))
    texts = [claim.text for claim in found if claim.role in ("cause", "and", "or", "not", "unknown")]
    garbled = tuple(text for text in texts if any(pattern.search(text) for pattern in GARBLED))
    where = next((claim for claim in found if claim.role == "where"), None)
    place = None if where is None else where.place
    named = next((claim.kind for claim in found if claim.role == "cause"), "")
    return Checked(
        verdict.outcome,
        _naming(verdict, found, truth),
        tuple(false),
        garbled,
        where.text if place is not None and truth.stages and place.stage not in (None, *truth.stages) else "",
        named,
        len(found),
        truth.faint,
    )


def from_gradients(truth: Truth) -> Truth:
    """What is true of ``truth`` as far as final gradients can tell."""
    spreads = "not-finite" in truth.kinds  # to every gradient before it
    return replace(truth, kinds=(*truth.kinds, *truth.alike), somewhere=truth.somewhere or spreads)


def _naming(verdict: Verdict, found: list[Claim], truth: Truth) -> Naming:
    first = next((claim for claim in found if claim.role == "cause"), None)
    if not truth.kinds:
        return {"pass": "silent", "fail": "alarm", "unknown": "needless"}[verdict.outcome]  # type: ignore[return-value]
    if first is None:
        return "unknown"
    parts = [part for part in (truth, *truth.also) if first.kind in part.kinds or _exchangeable(first, part)]
    if not parts:
        return "wrong"
    return "right" if any(not list(_misplaced(first, part)) for part in parts) else "elsewhere"


def _reasons(claim: Claim, truth: Truth, counts: Counts) -> Iterator[str]:
    """Why ``claim`` is not true."""
    if claim.role == "verdict":
        if not truth.kinds and claim.text == "fail":
            yield "nothing is wrong"
        elif truth.kinds and claim.text == "pass":
            yield f"it is wrong: {truth.kinds[0]}"
        return
    if claim.denies is None:
        yield "nobody knows this sentence: it needs a row in truth_claims.py"
    elif hit := claim.denies & truth.all_wrong:
        yield f"it denies {', '.join(sorted(hit))}, which is wrong"
    elif any(part.kinds[0] in claim.kinds for part in (truth, *truth.also) if part.kinds):
        yield "it rules out what is wrong"
    if claim.kind:
        yield from _of_cause(claim, truth)
        for number, what in COUNTED.findall(claim.text):  # numbers that are said to be the number of something
            if int(number) != (known := counts._asdict()[what]):
                yield f"the number of {what} is {known}"
    elif claim.place is not None and truth.kinds:
        yield from _nothing_there(claim, truth)


def _of_cause(claim: Claim, truth: Truth) -> Iterator[str]:
    """Why a cause is none, or not there: it must be true of one part of the fault."""
    every = (truth, *truth.also)
    parts = [part for part in every if claim.kind in part.kinds or _exchangeable(claim, part)]
    if not parts:
        yield f"the fault is {' or '.join(kind for part in every for kind in part.kinds) or 'none'}"
        return
    found = []
    for part in parts:
        other = claim.factor is not None and all(abs(claim.factor - one) > 0.01 * abs(one) for one in part.factors)
        factors = [f"its factor is {' or '.join(map(str, part.factors))}"] if other and part.factors else []
        found.append([*_misplaced(claim, part), *factors])
    yield from min(found, key=len)


def _exchangeable(claim: Claim, part: Truth) -> bool:
    """Whether it is told as an alternative of what the fault is, or that as an alternative of it."""
    groups = (_SAME_GRADIENTS, _ARRIVED, _ZEROS, _ZEROS_SENT, _ORDERS, _TARGETS, _TIMES)
    alike = frozenset[str]().union(*(kinds for kinds in groups if claim.kind in kinds))
    return bool(alike & set(part.kinds) & (claim.instead if claim.role != "or" else alike))


def _misplaced(claim: Claim, truth: Truth) -> Iterator[str]:
    place = claim.place
    assert place is not None, "a cause has a place, if only everywhere"
    if place.everywhere and (truth.stages or truth.ranks) and not truth.somewhere:
        yield f"it is not everywhere but at stage {list(truth.stages)}, rank {list(truth.ranks)}"
    for what, said, known in (("rank", place.rank, truth.ranks), ("stage", place.stage, truth.stages)):
        if said is not None and known and said not in known:
            yield f"it is at {what} {list(known)}"
    if truth.stages and not truth.somewhere and set(place.stages) - set(truth.stages):
        yield f"it is at stage {list(truth.stages)}"
    if place.microbatches and truth.microbatches and place.microbatches != truth.microbatches:
        yield f"it concerns microbatches {list(truth.microbatches)}"
    if place.parameter is not None and truth.parameter and not re.search(truth.parameter, place.parameter):
        yield f"it is parameter {truth.parameter}"


def _nothing_there(claim: Claim, truth: Truth) -> Iterator[str]:
    """Why a place at which something is said to differ cannot be one."""
    assert claim.place is not None, "asked for where there is a place"
    stage = claim.place.stage
    if truth.affected is not None and stage is not None and stage not in truth.affected:
        yield f"only stage {list(truth.affected)} can show anything"
    said = {stage, *claim.place.stages}
    if claim.role == "unknown" and truth.stages and not said & set(truth.stages):
        yield f"it was first wrong at stage {list(truth.stages)}"
    if claim.role == "unknown" and claim.place.parameter is not None and truth.parameter:
        if not re.search(truth.parameter, claim.place.parameter):
            yield f"it is first wrong at {truth.parameter}"


def _alternatives(found: list[Claim], truth: Truth) -> Iterator[False_]:
    """Causes that are told as alternatives though all of them hold."""
    if not truth.kinds or not any(claim.role == "or" for claim in found):
        return
    causes = [claim for claim in found if claim.role in ("cause", "or") and claim.place is not None]
    stages = {c.place.stage for c in causes if c.kind in truth.kinds and c.place is not None} - {None}
    several = len(stages) > 1 and stages <= set(truth.stages) and not truth.between
    parts, told = (truth, *truth.also), [claim for claim in found if claim.role in ("cause", "and")]
    both = {part.kinds[0] for part in parts} <= {claim.kind for claim in causes}
    sure = all(any(one.kind in part.kinds or _exchangeable(one, part) for one in told) for part in parts)
    halves = bool(truth.also) and both and not sure
    if len(causes) > 1 and (several or halves):
        yield False_("or", causes[-1].text, "both hold: it is no alternative")


def _untold(found: list[Claim], truth: Truth) -> Iterator[False_]:
    """Of a run with several faults, those that are passed over as if one of them were all: nothing is left open."""
    named = [claim for claim in found if claim.role in ("cause", "and", "or")]
    if truth.also and named and not any(claim.role == "unknown" for claim in found):
        for part in (truth, *truth.also):
            if not any(claim.kind in part.kinds and not list(_misplaced(claim, part)) for claim in named):
                yield False_("cause", named[0].text, f"nothing is said of what else is wrong: {part.kinds[0]}")


def _against_judge(found: list[Claim], verdict: Verdict) -> Iterator[False_]:
    """Sentences that the comparison of the same verdict speaks against."""
    wrong = {(m.stage, m.parameter) for m in verdict.mismatches if m.law in ("gradient", "presence")}
    failed = {law.name for law in verdict.laws if law.outcome == "fail"}
    for claim in found:
        if against := {SPEAKS_OF[thing] for thing in claim.denies or () if thing in SPEAKS_OF} & failed:
            yield False_(claim.role, claim.text, f"the law {', '.join(sorted(against))} of the same verdict failed")
        for stage, name in claim.right:
            if (stage, name) in wrong:
                yield False_(claim.role, claim.text, f"the gradient of {name} does not agree")
