"""The norm of the gradients: which other number it is, where gradients are right."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause, listed
from pipeproof.core.verdict import Mismatch
from pipeproof.explain.candidates import Candidate, called, multiples, near, rounded
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.rules.place import compared, found_of
from pipeproof.explain.rules.update import clip_factor, moved


def norm(evidence: Evidence) -> list[Cause]:
    """A norm that is not that of the gradients, although these are right, and which other number it is."""
    found = _wrong(evidence)
    known = () if evidence.members is None or not found else tuple(evidence.members.norm_causes())
    if not found or known:
        return _of_ranks(known, evidence)
    first = min(found, key=lambda one: one.rank or 0)
    rank, value, right = first.rank or 0, first.found, first.due
    reported = [one for one in evidence.norms if one is not None]
    finite = [one for one in reported if math.isfinite(one)]
    apart = 0 < len(finite) < len(reported) or any(not near(one, finite[0]) for one in finite[1:])
    alone = len({one.rank for one in found}) < len(reported)
    if evidence.norms[rank] is None or not isinstance(value, float) or not isinstance(right, float):
        return [Cause("report", rank if alone else None, detail=compared(found))]
    named = _called(value, right, evidence, rank if apart else None)
    went = [moved(one, evidence) for one in found_of("updated-parameters", evidence) if one.rank == rank]
    used = bool(went) and all(near(one.value, _clipped_by(value, evidence), one.noise) for one in went)
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
    """One cause: the first that is ``known`` of all ranks, or else what each rank reports."""
    own = {one.rank: one.detail for one in reversed(known)}
    if len(own) < 2 or None in own:
        return [*known[:1]]
    ranks = tuple(sorted(rank for rank in own if rank is not None))
    every = sum(one is not None for one in evidence.norms) == len(ranks)
    alike = {
        words: [rank for rank in ranks if own[rank] == words] for words in dict.fromkeys(own[rank] for rank in ranks)
    }
    told = "; ".join(f"rank{'s' * (len(some) > 1)} {listed(some)}: {words}" for words, some in alike.items())
    return [replace(known[0], rank=None, ranks=() if every else ranks, detail=told)]


def of_no_known_norm(evidence: Evidence) -> tuple[str, ...]:
    """What is said of a norm that is wrong beside gradients that are right, and of which ``norm`` names no cause."""
    told = "the norm is like nothing known of the gradients that were compared: {}; it is formed in another way, or "
    told += "gradients were changed after they were compared and before it was formed"
    return tuple(told.format(compared([one])) for one in _wrong(evidence)[:1])


def _wrong(evidence: Evidence) -> list[Mismatch]:
    """The norms that are wrong beside gradients that are right."""
    return [] if any(map(evidence.differs, ("gradient", "presence"))) else found_of("grad-norm", evidence)


def _called(value: float, right: float, evidence: Evidence, rank: int | None) -> Candidate | None:
    """What the norm is; ``rank``: the one that alone has it."""
    scale = 1.0 if evidence.scale is None else evidence.scale.losses
    scaled = (
        [Candidate(f"{scale:g} times the right one, which is the loss scale", right * scale)] if scale != 1.0 else []
    )
    return called(value, scaled, ALIKE) or called(value, _candidates(evidence, right, rank))


def _candidates(evidence: Evidence, right: float, rank: int | None) -> Iterator[Candidate]:
    """Other norms of the same gradients that a step may form by mistake; ``rank``: the one that alone forms this."""
    sizes, number = evidence.sizes, evidence.number
    by_stage = {s: _root(size for (own, _), size in sizes.items() if own == s) for s in range(evidence.stages)}
    ranks = {*evidence.placement}
    by_rank = [_root(by_stage[s] for s in by_stage if evidence.placement[s] == one) for one in sorted(ranks)]
    held = None if rank is None else evidence.held(rank)  # what all ranks agree on is no rank's own
    if held is not None:
        own = _root(size for site, size in sizes.items() if site in held)
        yield Candidate(f"that of rank {rank}'s gradients alone", own)
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
    before = () if evidence.seen is None else evidence.seen.ranks[rank or 0][:number]
    yield from (Candidate("that of an earlier step", one.norm) for one in before if one.norm is not None)
    yield from rounded(right)


def _clipped_by(norm: float, evidence: Evidence) -> float:
    """How many times as far as it should a parameter moves where gradients are clipped by ``norm``."""
    return clip_factor(evidence, norm) / clip_factor(evidence, evidence.expected.norm)


def _root(sizes: Iterable[float]) -> float:
    return math.sqrt(math.fsum(size**2 for size in sizes))
