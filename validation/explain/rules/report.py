"""A step's reports: wrong losses, outputs and norms beside right gradients.

Right gradients do not prove the computation of losses and outputs: parts without a gradient may be wrong in them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.core.observe.likeness import Label, Likeness
from pipeproof.core.observe.observed import RankOperation
from pipeproof.core.observe.recording import Point
from pipeproof.core.verdict import Mismatch
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.known import Known
from pipeproof.explain.likeness import likeness
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.rules.factors import Candidate, find_candidate, is_near, multiples, round_candidates
from pipeproof.explain.rules.places import describe_mismatches, mismatches_of, name_ranks
from pipeproof.explain.rules.update import clip_factor, update_factor

GRADIENTS = ("gradient", "presence")


def losses(evidence: Evidence) -> list[Mismatch]:
    """Wrong microbatch losses beside right gradients; by default, wrong totals."""
    found = mismatches_of("loss", evidence, unless=(*GRADIENTS, "buffers", "updated-parameters"))
    return [one for one in found if one.microbatch is not None] or found


def list_unreported(what: str, found: Sequence[Mismatch]) -> Sequence[str]:
    """Say that ``what`` is wrong without an explanation; empty if right."""
    text = "are wrong and gradients are right: wrong numbers are reported, or the wrong part has no gradient"
    return (f"{what} {text}",) if found else ()


def wrong_outputs(evidence: Evidence) -> list[Mismatch]:
    """Wrong outputs, if all their sources are right."""
    return mismatches_of("outputs", evidence, unless=(*GRADIENTS, "buffers", "loss", "boundaries"))


def of_no_known_norm(evidence: Evidence) -> Sequence[str]:
    """Describe a wrong norm beside right gradients without a cause from ``norm``."""
    text = "the norm matches no known norm of the compared gradients: {}; it is formed in another way, or "
    text += "gradients were changed after they were compared and before it was formed"
    found = mismatches_of("grad-norm", evidence, unless=GRADIENTS)
    return tuple(text.format(describe_mismatches([one])) for one in found[:1])


def report(evidence: Evidence) -> list[Cause]:
    """Find losses from other microbatches, or with a common multiple."""
    found = losses(evidence)
    first = found[0].ratio if found else None
    ratio = first if all(is_near(one.ratio, first) for one in found) else None
    words = _name_losses(found, evidence, ratio) if found else ""
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
            factor=ratio,
            detail=f"loss {found[0].observed_text}, expected {found[0].expected_text}: {words}; gradients are right",
        )
    ]


def _name_losses(found: Sequence[Mismatch], evidence: Evidence, ratio: float | None) -> str:
    """Describe the observed losses relative to the right values; empty if nothing matches."""
    single = found[0].microbatch is not None
    microbatches = {one.microbatch for one in found}
    if ratio is not None and single and len(microbatches) == evidence.microbatches > 1:
        return f"each is {ratio:.6g} times the right one"
    if evidence.operation == "eval" and single:
        return ""  # it leaves no gradient that shows whether they were computed right
    rows, right, alone = _rows(evidence), evidence.expected.losses, True
    if evidence.members is not None:
        alone = evidence.members.replicas.count == 1
        reported: dict[tuple[int, int], list[float]] = {}
        for replica, row in zip(evidence.members.replicas.of, rows, strict=False):
            for m, one in zip(row.share or (), row.losses, strict=False):
                reported.setdefault((replica, m), []).append(one)
        means = [len(ones) > 1 and is_near(sum(ones) / len(ones), right[m]) for (_, m), ones in reported.items()]
        if means and all(means):
            return "ranks that work on one replica report their own parts', and the mean of these is right"
    words = {_name_loss(one, evidence, rows) for one in found}
    if len(words) == 1 and "" not in words:
        return words.pop()
    reporting = [row for row in rows if row.loss is not None or row.losses]
    return "other ranks report the right ones" if alone and len({one.rank for one in found}) < len(reporting) else ""


def _name_loss(one: Mismatch, evidence: Evidence, rows: Sequence[RankOperation]) -> str:
    """Identify a loss; empty if nothing matches."""
    if not isinstance(one.observed, float) or not isinstance(one.expected, float):
        return ""
    right, divisor = evidence.expected.losses, None if evidence.beside is None else evidence.beside.loss.divisor
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


def outputs(evidence: Evidence) -> list[Cause]:
    """Find outputs from other microbatches, or with a known change."""
    found = wrong_outputs(evidence)
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


def _rows(evidence: Evidence) -> list[RankOperation]:
    """Each rank's share in the operation."""
    return [] if evidence.run is None else [row[evidence.number] for row in evidence.run.ranks]


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


def norm(evidence: Evidence) -> list[Cause]:
    """Find a wrong norm beside right gradients, and the number it equals."""
    found = mismatches_of("grad-norm", evidence, unless=GRADIENTS)
    known = () if evidence.members is None or not found else tuple(evidence.members.norm_causes())
    if not found or known:
        return _of_ranks(known, evidence)
    first = min(found, key=lambda one: one.rank or 0)
    rank, value, right = first.rank or 0, first.observed, first.expected
    reported = [one for one in evidence.norms if one is not None]
    finite = [one for one in reported if math.isfinite(one)]
    apart = 0 < len(finite) < len(reported) or any(not is_near(one, finite[0]) for one in finite[1:])
    alone = len({one.rank for one in found}) < len(reported)
    if evidence.norms[rank] is None or not isinstance(value, float) or not isinstance(right, float):
        return [Cause("report", rank if alone else None, detail=describe_mismatches(found))]
    scale = 1.0 if evidence.scale is None else evidence.scale.losses
    scaled = [Candidate(f"{scale:g} times the right one, which is the loss scale", right * scale)]
    named = find_candidate(value, scaled, ALIKE) if scale != 1.0 else None
    named = named or find_candidate(value, _candidates(evidence, right, rank if apart else None))
    went = [update_factor(one, evidence) for one in mismatches_of("updated-parameters", evidence) if one.rank == rank]
    clipped = clip_factor(evidence, value) / clip_factor(evidence, evidence.expected.norm)
    used = bool(went) and all(is_near(one.value, clipped, one.noise) for one in went)
    if named is None and not alone and not used:
        return []  # gradients may have been changed after they were compared: see ``of_no_known_norm``
    stage = None if named is None else named.stage
    holders = [] if stage is None else evidence.holders(stage)
    if apart and rank not in holders:
        stage = None  # a mistake about another rank's stage is made on this one
    words = f"{value:.6g} in place of {right:.6g}: {named.words if named else 'like nothing known'}"
    return [
        Cause(
            "report" if alone and not went else (named.kind if named else "") or "norm",
            rank=rank if apart else holders[0] if len(holders) == 1 else None,
            stage=stage,
            factor=value / right if right and math.isfinite(value) else None,
            detail=f"{words}{'; gradients were clipped by it' * used}",
        )
    ]


def _of_ranks(known: Sequence[Cause], evidence: Evidence) -> list[Cause]:
    """Merge into a cause: the first ``known`` for all ranks, or else each rank's report."""
    own = {one.rank: one.detail for one in reversed(known)}
    if len(own) < 2 or None in own:
        return [*known[:1]]
    ranks = tuple(sorted(rank for rank in own if rank is not None))
    alike: dict[str, list[int]] = {}
    for rank in ranks:
        alike.setdefault(own[rank], []).append(rank)
    text = "; ".join(f"{name_ranks(some)}: {words}" for words, some in alike.items())
    every = sum(one is not None for one in evidence.norms) == len(ranks)
    return [replace(known[0], rank=None, ranks=() if every else ranks, detail=text)]


def _candidates(evidence: Evidence, right: float, rank: int | None) -> Iterator[Candidate]:
    """Yield norms that a step may compute by mistake; ``rank``: the only rank with the value."""
    sizes, number = evidence.sizes, evidence.number
    by_stage = {s: _root(size for (own, _), size in sizes.items() if own == s) for s in range(evidence.stages)}
    ranks = {*evidence.placement}
    by_rank = [_root(by_stage[s] for s in by_stage if evidence.placement[s] == one) for one in sorted(ranks)]
    if rank is not None and evidence.members is None:  # a value that all ranks share is no rank's own
        own = (size for (stage, _), size in sizes.items() if evidence.placement[stage] == rank)
        yield Candidate(f"that of rank {rank}'s gradients alone", _root(own))
    for stage, size in by_stage.items():
        at = stage if len(by_stage) > 1 else None  # of the only one, that is no place
        yield Candidate(f"that without stage {stage}'s gradients", math.sqrt(max(0.0, right**2 - size**2)), stage=at)
        yield Candidate(f"that with stage {stage}'s gradients twice", math.sqrt(right**2 + size**2), stage=at)
    for name, parts in (("ranks'", by_rank), ("parameters'", sizes.values())):
        yield Candidate(f"the largest of the {name} norms", max(parts, default=0.0))
    yield Candidate("that with every copy of a tied parameter", _root(sizes.values()))
    for name, parts in (
        ("the parameters'", sizes.values()),
        ("the ranks'", by_rank),
        ("the stages'", by_stage.values()),
    ):
        yield Candidate(f"the sum of {name} norms", math.fsum(parts))
    kept = [one for one in evidence.gradients.values() if one is not None]
    yield Candidate("the 1-norm", math.fsum(float(one.double().abs().sum()) for one in kept))
    yield Candidate("its square", right**2)
    yield from multiples(right, (evidence.microbatches, evidence.ranks, evidence.stages))
    for count in sorted({evidence.ranks, evidence.stages}):
        yield Candidate(f"that with every square {count} times", right * math.sqrt(count))
        yield Candidate(f"that with every square over {count}", right / math.sqrt(count))
    yield Candidate("that of the clipped gradients", right * clip_factor(evidence, right))
    before = () if evidence.run is None else evidence.run.ranks[rank or 0][:number]
    yield from (Candidate("that of an earlier step", one.norm) for one in before if one.norm is not None)
    yield from round_candidates(right)


def _root(sizes: Iterable[float]) -> float:
    return math.sqrt(math.fsum(size**2 for size in sizes))
