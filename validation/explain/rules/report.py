"""A step's reports: wrong losses and outputs beside right gradients.

Right gradients do not prove the computation of losses and outputs: parts without a gradient may be wrong in them.
"""

from collections.abc import Sequence

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.core.observe.likeness import Label, Likeness
from pipeproof.core.observe.observed import RankOperation
from pipeproof.core.observe.recording import Point
from pipeproof.core.verdict import Mismatch
from pipeproof.explain.candidates import Candidate, find_candidate, is_near, multiples, round_candidates
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.known import Known
from pipeproof.explain.likeness import likeness
from pipeproof.explain.rules.place import mismatches_of

_UPSTREAM = ("gradient", "presence", "buffers")
_UNTOLD = "{0} are wrong and gradients are right: wrong numbers are reported, or the wrong part has no gradient"


def report(evidence: Evidence) -> list[Cause]:
    """Find losses from other microbatches, or with a common multiple."""
    found = _losses(evidence)
    words = _name_losses(found, evidence) if found else ""
    if not words:
        return []
    ranks = {one.rank for one in found if one.rank is not None}
    reporting = sum(bool(row.losses) for row in _rows(evidence))
    microbatches = sorted({one.microbatch for one in found if one.microbatch is not None})
    return [
        Cause(
            "report",
            rank=found[0].rank if len(ranks) == 1 < evidence.ranks else None,
            ranks=tuple(sorted(ranks)) if 1 < len(ranks) < reporting else (),
            microbatches=tuple(microbatches),
            factor=_ratio(found),
            detail=f"loss {found[0].observed_text}, expected {found[0].expected_text}: {words}; gradients are right",
        )
    ]


def list_unreported(evidence: Evidence) -> Sequence[str]:
    """Say that wrong losses lack an explanation; empty if losses match."""
    return (_UNTOLD.format("losses"),) if _losses(evidence) else ()


def outputs(evidence: Evidence) -> list[Cause]:
    """Find outputs from other microbatches, or with a known change."""
    found = _outputs(evidence)
    if len({(one.rank, one.output) for one in found}) != 1:
        return []
    really = [_likeness(one, evidence) for one in found]
    words = [one.text for one in really if one is not None and (one.is_known or one.part is not None)]
    others = [one.label.point.microbatch for one in really if one is not None and one.kind == "other" and one.label]
    if len(words) < len(found) or (len(others) < len(found) and len({*words}) > 1):
        return []
    several = len(others) > 1
    text = words[0] if len({*words}) == 1 else f"microbatch{'es' * several} {join_numbers(others)}'s"
    microbatches = tuple(one.microbatch for one in found if one.microbatch is not None)
    detail = f"output {found[0].output}: {text}; gradients are right"
    return [Cause("report", rank=found[0].rank, microbatches=microbatches, detail=detail)]


def untold(evidence: Evidence) -> Sequence[str]:
    """Say that wrong outputs lack an explanation; empty if outputs match."""
    return (_UNTOLD.format("outputs"),) if _outputs(evidence) else ()


def _losses(evidence: Evidence) -> list[Mismatch]:
    """Wrong microbatch losses beside right gradients; by default, wrong totals."""
    found = mismatches_of("loss", evidence)
    found = [one for one in found if one.microbatch is not None] or found
    return [] if any(map(evidence.differs, (*_UPSTREAM, "updated-parameters"))) else found


def _name_losses(found: Sequence[Mismatch], evidence: Evidence) -> str:
    """Describe the observed losses relative to the right values; empty if nothing matches."""
    ratio, single = _ratio(found), found[0].microbatch is not None
    microbatches = {one.microbatch for one in found}
    if ratio is not None and single and len(microbatches) == evidence.microbatches > 1:
        return f"each is {ratio:.6g} times the right one"
    if evidence.operation == "eval" and single:
        return ""  # it leaves no gradient that shows whether they were computed right
    if _mean_is_right(evidence):
        return "ranks that work on one replica report their own parts', and the mean of these is right"
    words = {_one_called(one, evidence) for one in found}
    if len(words) == 1 and "" not in words:
        return words.pop()
    alone = evidence.members is None or evidence.members.replicas.count == 1
    reporting = [row for row in _rows(evidence) if row.loss is not None or row.losses]
    return "other ranks report the right ones" if alone and len({one.rank for one in found}) < len(reporting) else ""


def _one_called(one: Mismatch, evidence: Evidence) -> str:
    """Identify a loss; empty if nothing matches."""
    if not isinstance(one.observed, float) or not isinstance(one.expected, float):
        return ""
    right, divisor = evidence.expected.losses, None if evidence.beside is None else evidence.beside.loss.divisor
    rows = _rows(evidence)
    share = [right[m] for m in (rows[one.rank].share if one.rank is not None and rows else None) or ()]
    counts = evidence.microbatches, evidence.ranks, evidence.stages, *(() if divisor is None else (divisor,))
    own = "each replica reports the mean of its own microbatches; as one number the whole step's is expected"
    candidates = [
        *(Candidate("that of one of the microbatches", loss) for loss in right),
        *(Candidate(own, sum(share) / len(share)) for _ in share[:1] if one.microbatch is None),
        *round_candidates(one.expected),
        *multiples(one.expected, counts),
    ]
    named = find_candidate(one.observed, candidates)
    return named.words if named else ""


def _ratio(found: Sequence[Mismatch]) -> float | None:
    """The losses' common ratio to the right values."""
    first = found[0].ratio
    return first if all(is_near(one.ratio, first) for one in found) else None


def _mean_is_right(evidence: Evidence) -> bool:
    """True if ranks of each replica report different numbers for every microbatch, with the right mean."""
    reported: dict[tuple[int, int], list[float]] = {}
    replicas = () if evidence.members is None else evidence.members.replicas.of
    for replica, row in zip(replicas, _rows(evidence), strict=False):
        for m, one in zip(row.share or (), row.losses, strict=False):
            reported.setdefault((replica, m), []).append(one)
    right = evidence.expected.losses
    means = [len(ones) > 1 and is_near(sum(ones) / len(ones), right[m]) for (_, m), ones in reported.items()]
    return bool(means) and all(means)


def _rows(evidence: Evidence) -> list[RankOperation]:
    """Each rank's share in the operation."""
    return [] if evidence.run is None else [row[evidence.number] for row in evidence.run.ranks]


def _outputs(evidence: Evidence) -> list[Mismatch]:
    """Wrong outputs, if all their sources are right."""
    upstream = any(map(evidence.differs, (*_UPSTREAM, "loss", "boundaries")))
    return [] if upstream else mismatches_of("outputs", evidence)


def _likeness(one: Mismatch, evidence: Evidence) -> Likeness | None:
    """Identify a wrong output; None if missing."""
    if one.rank is None or one.microbatch is None or one.output is None:
        return None
    own = evidence.observed.ranks[one.rank][evidence.number]
    share = list(range(evidence.microbatches) if own.share is None else own.share)
    expected = [made.outputs[one.output].cpu() for made in evidence.expected.contributions]
    labels = [Label(Point(evidence.stages - 1, m, one.output)) for m in range(len(expected))]
    observed = own.outputs[one.output][share.index(one.microbatch)].to(expected[one.microbatch])  # in one type
    known, at = Known(zip(labels, expected, strict=True)), labels[one.microbatch]
    return likeness(observed, expected[one.microbatch], at, known=known, limit=one.limit or 0.0)
