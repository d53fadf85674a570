"""What the sentences of a verdict claim.

A line under ``not`` denies kinds of fault, and its evidence says that certain things are right: ``EVIDENCE`` has a row
for the words of each. Only these, and the sentences on what stays open, are read as text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeproof.core.cause import Cause, RuledOut
from pipeproof.core.verdict import Verdict
from pipeproof.wings.composed.whole import AS_IT_CAME

# What can be wrong in a run. A truth has some of them; a sentence denies some of them.
THINGS = frozenset(
    "partition held weights order mode messages memory computation boundary loss sums reduction replicas gradients "
    "norm clip update buffers report dropped doubled swapped stale scale tied".split()
)

# What a kind of fault is called where it is ruled out.
OF_KIND: Mapping[str, str] = {
    **{
        kind: kind
        for kind in "partition order mode computation norm clip update buffers report dropped doubled".split()
    },
    **dict.fromkeys(("wrong-message", "swapped-data"), "messages"),
    **dict.fromkeys(("swapped-activations", "swapped-gradients", "mispaired"), "swapped"),
    **dict.fromkeys(("tied-not-summed", "tied-doubled"), "tied"),
    **dict.fromkeys(("stale-gradient", "stale-tensor"), "stale"),
    **dict.fromkeys(("scale", "sign", "unequal-weights"), "scale"),
    **{"overwritten": "memory", "not-reduced": "replicas"},
}

# The kinds above leave things out that the words of the evidence speak of: what all was compared, and is right.
EVIDENCE: Sequence[tuple[str, frozenset[str]]] = tuple(
    (pattern, frozenset(things.split()))
    for pattern, things in (
        (r"every parameter is (held once|in the stage that should hold it)$", "held"),
        (r"every stage began with the model's parameters$", "weights"),
        (r"every stage ran once each way for each microbatch, in ", "order mode"),
        (r"every tensor between stages is right", "boundary"),
        (r"every boundary tensor is right$", "boundary"),
        (r"each action added what its microbatch contributes$", "sums"),
        (r"every copy has the sum of all shares$", "tied"),
        (r"ranks that have a stage in common agree$", "replicas"),
        (r"every gradient that was compared is what it should be$", "gradients"),
        (r"the norm is that of the gradients$", "norm"),
        (r"all gradients were multiplied alike$", "clip"),
        (r"the optimizer did what it should$", "update"),
        (r"what forwards leave behind is right$", "buffers"),
        (r"every (reported loss|loss that was reported) is right$", "report"),
        (r"every microbatch is in every stage's sum$", "dropped"),
        (r"no microbatch is there twice$", "doubled"),
        (r"every activation( in the sums)? met its own microbatch's output gradient$", "swapped"),
        (r"nothing of an earlier step is in the sums$", "stale"),
        (r"every contribution has factor 1$", "scale"),
    )
)

# Sentences on what stays open that claim nothing but how far the search came.
_SAYS_NOTHING = (
    r"unjudged: ",
    r"first not bit for bit: ",
    r"no fault is proven: ",
    r"gradients of replicas are no multiple of their sum, nor ",
    r"first compared wrong: ",
    r"stage \d+: (no mix of the reference's contributions explains these|rounding hides what its) gradients",
    r"gradients differ by no more than rounding allows",
    r"stage \d+: the coefficients of .* are not decided",
    r"stage \d+: the gradient of \S+ is (no multiple|wrong in|no sum|\w+\[.*, expected )",
    r"not reproduced: ",
    r"a race, or something else that is not seeded",
    r"the runtime \S+ is not ours",
    r"gradients differ between ranks that share parameters",
    r"(not explained by this|nothing explains this): ",
    r"the weights differ before the step, and no known fault explains how",
    r"parameters of the step and of (the reference|what is expected) do not go together",
    r"losses are wrong and gradients are right: ",
    r"[\w-]+: no known fault explains its mismatches$",
    r"the norm matches no known norm of the compared gradients: ",
    r"\d+ more wrong gradients were not examined",
    r"where the reference passes from stage to stage could not be found",
    r"all microbatches are the same: ",
    r"the cause was not found in time",
    r"shards of \S+: ",
    r"the shards of ranks \d+, \d+ are not made of microbatches alike",
    r"no gradient was handed back, and the weights after the step are right",
    r"rank \d+, stage \d+: the gradient of \S+ is of shape ",
    r"later effects were not analysed",
)

# A law that passed says that these are right.
LAWS: Mapping[str, frozenset[str]] = {
    name: frozenset(things.split())
    for name, things in {
        "parameters-once": "held",
        "initial-weights": "weights",
        "microbatches": "order mode",
        "boundaries": "boundary",
        "loss": "loss report",
        "gradient": "gradients",
        "grad-norm": "norm",
        "updated-parameters": "update clip",
        "buffers": "buffers",
    }.items()
}

# A sentence that denies one of these speaks against its own verdict where that law failed.
SPEAKS_OF: Mapping[str, str] = {
    thing: law
    for law in ("microbatches", "parameters-once", "initial-weights", "boundaries", "gradient", "buffers")
    for thing in LAWS[law]
}

FIRST_WRONG = re.compile(r"first observed wrong: (?:between rank \d+, stage (\d+) and )?rank (\d+), stage (\d+), ")
FIRST_IN_BACKWARD = re.compile(
    r"the backward first goes wrong at (\S+) \(stage (\d+)\): "
    r"the \d+ parameters? that the forward uses later (?:is|are) "
)
OF_STAGE = re.compile(r"of stage (\d+), (.+?) (?:is|are) right$")
COUNTED = re.compile(r"(?:^|\D)(\d+) = (?:1 / )?the number of (microbatches|ranks|stages|replicas)\b")
GARBLED = (
    re.compile(r"(has|of|with|is|:) ?;"),  # nothing between
    re.compile(r": ?$"),  # nothing at the end
    re.compile(r"  "),
)


class Place(NamedTuple):
    """Where a sentence says that something is; None, or nothing, where it does not say."""

    rank: int | None = None
    stage: int | None = None
    microbatches: tuple[int, ...] = ()
    parameter: str | None = None
    stages: tuple[int, ...] = ()  # of what is in several

    @property
    def everywhere(self) -> bool:
        """Whether it is at no place in particular."""
        return self == Place()


@dataclass(frozen=True)
class Claim:
    """A sentence and what it claims. ``role``: verdict, law, cause, and, or, not, unknown or where.

    ``denies``: what it says is right; None where nobody knows the sentence. ``kinds`` are those that it rules out,
    ``right`` parameters of a stage that it calls right. ``law``: of a mismatch, the law that it broke.
    """

    role: str
    text: str
    kind: str = ""
    place: Place | None = None
    denies: frozenset[str] | None = frozenset()
    kinds: tuple[str, ...] = ()
    right: tuple[tuple[int, str], ...] = ()
    law: str = ""
    factor: float | None = None
    instead: frozenset[str] = frozenset()


def denied(reason: RuledOut) -> frozenset[str] | None:
    """What a line under ``not`` says is right; None where nobody knows its evidence."""
    known = next((things for pattern, things in EVIDENCE if re.match(pattern, reason.evidence)), None)
    return None if known is None else known | {OF_KIND[kind] for kind in reason.kinds if kind in OF_KIND}


def claims(verdict: Verdict) -> Iterator[Claim]:
    """Every sentence of ``verdict`` that claims something."""
    yield Claim("verdict", verdict.outcome)
    absent = any(law.name == "presence" and law.outcome == "fail" for law in verdict.laws)
    for law in verdict.laws:  # a gradient that is not there is that law's matter
        here = AS_IT_CAME in law.note  # of a chain of links that is broken elsewhere
        if law.outcome == "pass" and not here and not (absent and law.name == "gradient"):
            yield Claim("law", str(law).strip(), denies=LAWS.get(law.name, frozenset()), law=law.name)
    instead = frozenset(cause.kind for explanation in verdict.alternatives for cause in explanation)
    for number, cause in enumerate(verdict.causes):
        yield replace(_of_cause("and" if number else "cause", cause), instead=instead)
    for explanation in verdict.alternatives:
        for cause in explanation:
            if cause not in verdict.causes:
                yield _of_cause("or", cause)
    yield from map(_of_reason, verdict.ruled_out)
    yield from map(_of_open, verdict.undecided)
    for mismatch in verdict.mismatches[:1]:
        microbatches = () if mismatch.microbatch is None else (mismatch.microbatch,)
        place = Place(mismatch.rank, mismatch.stage, microbatches, mismatch.parameter)
        yield Claim("where", f"{mismatch.where}; {mismatch.law}", place=place, law=mismatch.law)


def _of_cause(role: str, cause: Cause) -> Claim:
    place = Place(cause.rank, cause.stage, cause.microbatches, cause.parameter, cause.stages)
    return Claim(role, f"{cause.kind}: {cause}", cause.kind, place, factor=cause.factor)


def _of_reason(reason: RuledOut) -> Claim:
    if found := OF_STAGE.match(reason.evidence):
        right = tuple((int(found[1]), name) for name in found[2].split(", "))
        return Claim("not", str(reason), kinds=reason.kinds, right=right)
    return Claim("not", str(reason), denies=denied(reason), kinds=reason.kinds)


def _of_open(text: str) -> Claim:
    if found := FIRST_WRONG.match(text):
        sender = () if found[1] is None else (int(found[1]), int(found[3]))
        return Claim("unknown", text, place=Place(int(found[2]), int(found[3]), stages=sender))
    if found := FIRST_IN_BACKWARD.match(text):
        return Claim("unknown", text, place=Place(stage=int(found[2]), parameter=found[1]))
    known = any(re.match(pattern, text) for pattern in _SAYS_NOTHING)
    return Claim("unknown", text, denies=frozenset() if known else None)
