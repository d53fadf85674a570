"""What the sentences of a verdict claim: the one place where text is read back.

A sentence under ``not`` denies that certain things are wrong; ``DENIALS`` has a row for each such sentence. Once
reasons are values with what they deny, ``denied`` is all that changes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from validation.judging.cause import Cause
from validation.judging.verdict import Verdict, told

# What can be wrong in a run. A truth has some of them; a sentence denies some of them.
THINGS = frozenset(
    "partition held weights order mode messages memory computation boundary loss sums reduction replicas gradients "
    "norm clip update buffers report dropped doubled swapped stale scale".split()
)

# What a kind of fault is called where it is ruled out.
OF_KIND: Mapping[str, str] = MappingProxyType(
    {
        "partition": "partition",
        "order": "order",
        "mode": "mode",
        "wrong-message": "messages",
        "overwritten": "memory",
        "computation": "computation",
        "not-reduced": "replicas",
        "norm": "norm",
        "clip": "clip",
        "update": "update",
        "buffers": "buffers",
        "report": "report",
        "dropped": "dropped",
        "doubled": "doubled",
        "swapped-activations": "swapped",
        "swapped-gradients": "swapped",
        "mispaired": "swapped",
        "stale-gradient": "stale",
        "stale-tensor": "stale",
        "scale": "scale",
        "sign": "scale",
        "unequal-weights": "scale",
    }
)

# Sentences that speak of nothing but how far the search came: they deny nothing.
_SAYS_NOTHING = (
    r"messages, buffers, computation: what passed the boundaries does not say$",
    r"unjudged: ",
    r"stage \d+: no combination of what the reference knows makes its gradients",
    r"stage \d+: the coefficients of .* are not decided",
    r"stage \d+: the gradient of \S+ is (no multiple|wrong in|no sum)",
    r"not reproduced: ",
    r"a race, or something else that is not seeded",
    r"the runtime \S+ is not ours",
    r"what ranks have of one stage does not go together",
    r"the weights differ before the step, in a way that tells nothing",
    r"parameters of the step and of (the reference|what is expected) do not go together",
    r"losses are wrong and gradients right: ",
    r"[\w-]+: what is wrong with it tells nothing$",
    r"\d+ more wrong gradients were not looked at",
    r"where the reference passes from stage to stage could not be found",
    r"all microbatches are the same: ",
    r"the cause was not found in time",
    r"looking for the cause raised",
    r"cause not sought",
)

# The beginning of a sentence, and what it denies.
DENIALS: Sequence[tuple[str, frozenset[str]]] = tuple(
    (pattern, frozenset(things.split()))
    for pattern, things in (
        (r"partition: every parameter is ", "partition held"),
        (r"weights: every stage began with ", "weights"),
        (r"order, mode: every (watched )?stage ran once", "order mode"),
        (r"mode: every watched stage ran in the right mode", "mode"),
        (r"messages, buffers, computation: every ", "messages memory computation boundary"),
        (r"microbatches: each action added ", "sums"),
        (r"tied parameters: every copy has ", "reduction"),
        (r"replicas: ranks that have a stage in common agree", "replicas"),
        (r"gradients: they are made of what they should be", "gradients"),
        (r"norm: it is that of the gradients", "norm"),
        (r"clip: all gradients were multiplied alike", "clip"),
        (r"clip, update: the optimizer did ", "clip update"),
        (r"update: the optimizer did ", "update"),
        (r"buffers: what forwards leave behind is right", "buffers"),
        (r"report: what was reported is what was computed", "report"),
        (r"computation: every loss is right", "computation loss"),
        (r"dropped: every microbatch is in ", "dropped"),
        (r"doubled: no microbatch is there twice", "doubled"),
        (r"swapped: every activation met ", "swapped"),
        (r"stale: nothing of an earlier step ", "stale"),
        (r"scale: what is there is there with factor 1", "scale"),
        *((pattern, "") for pattern in _SAYS_NOTHING),
    )
)

# A law that passed says that these are right.
LAWS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
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
)

# A sentence that denies one of these speaks against its own verdict where that law failed.
SPEAKS_OF: Mapping[str, str] = MappingProxyType(
    {
        "order": "microbatches",
        "mode": "microbatches",
        "held": "parameters-once",
        "weights": "initial-weights",
        "boundary": "boundaries",
        "gradients": "gradient",
        "buffers": "buffers",
    }
)

FIRST_WRONG = re.compile(r"first seen wrong: rank (\d+), stage (\d+), ")
ALL_OF_STAGE = re.compile(r"all of stage (\d+): (.+?) (?:is|are) right$")
COUNTED = re.compile(r"(?:^|\D)(\d+), (?:one over )?the number of (microbatches|ranks|stages|replicas)\b")
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

    @property
    def everywhere(self) -> bool:
        """Whether it is at no place in particular."""
        return self == Place()


@dataclass(frozen=True)
class Claim:
    """A sentence and what it claims. ``role``: verdict, law, cause, or, not, unknown or where.

    ``denies``: what it says is right; None where nobody knows the sentence. ``right`` are parameters of a stage that it
    calls right. ``law``: of a mismatch, the law that it broke.
    """

    role: str
    text: str
    kind: str = ""
    place: Place | None = None
    denies: frozenset[str] | None = frozenset()
    right: tuple[tuple[int, str], ...] = ()
    law: str = ""
    factor: float | None = None


def denied(reason: object) -> frozenset[str] | None:
    """What a reason under ``not`` says is right; None for a sentence that nobody knows."""
    text = str(reason)
    return next((things for pattern, things in DENIALS if re.match(pattern, text)), None)


def claims(verdict: Verdict) -> Iterator[Claim]:
    """Every sentence of ``verdict`` that claims something."""
    yield Claim("verdict", verdict.verdict)
    absent = any(law.name == "presence" and law.outcome == "fail" for law in verdict.laws)
    for law in verdict.laws:  # a gradient that is not there is that law's matter
        if law.outcome == "pass" and not (absent and law.name == "gradient"):
            yield Claim("law", str(law).strip(), denies=LAWS.get(law.name, frozenset()), law=law.name)
    for number, cause in enumerate(verdict.cause):
        yield _of_cause("or" if number else "cause", cause)
    for reason in verdict.cause[0].ruled_out if verdict.cause else ():
        yield _of_reason("not", reason)
    for reason in verdict.undecided:
        yield _of_reason("unknown" if not verdict.cause else "not", reason)
    for mismatch in verdict.mismatches[:1]:
        place = Place(mismatch.rank, mismatch.stage, _one(mismatch.microbatch), mismatch.parameter)
        yield Claim("where", f"{mismatch.where}; {mismatch.law}", place=place, law=mismatch.law)


def _of_cause(role: str, cause: Cause) -> Claim:
    place = Place(cause.rank, cause.stage, cause.microbatches, cause.parameter)
    return Claim(role, f"{cause.kind}: {told(cause)}", cause.kind, place, factor=cause.factor)


def _of_reason(role: str, reason: object) -> Claim:
    text = str(reason)
    if found := FIRST_WRONG.match(text):
        return Claim(role, text, place=Place(int(found[1]), int(found[2])))
    if found := ALL_OF_STAGE.match(text):
        return Claim(role, text, right=tuple((int(found[1]), name) for name in found[2].split(", ")))
    return Claim(role, text, denies=denied(reason))


def _one(microbatch: int | None) -> tuple[int, ...]:
    return () if microbatch is None else (microbatch,)
