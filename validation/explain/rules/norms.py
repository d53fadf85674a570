"""A wrong gradient norm: which number it equals, beside right gradients."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.core.verdict import Mismatch
from pipeproof.explain.candidates import Candidate, find_candidate, is_near, multiples, round_candidates
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.rules.place import describe_mismatches, mismatches_of
from pipeproof.explain.rules.update import clip_factor, update_factor


def norm(evidence: Evidence) -> list[Cause]:
    """Find a wrong norm beside right gradients, and the number it equals."""
    found = _wrong(evidence)
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
    named = _name_norm(value, right, evidence, rank if apart else None)
    went = [update_factor(one, evidence) for one in mismatches_of("updated-parameters", evidence) if one.rank == rank]
    used = bool(went) and all(is_near(one.value, _clipping_factor(value, evidence), one.noise) for one in went)
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
    every = sum(one is not None for one in evidence.norms) == len(ranks)
    alike = {
        words: [rank for rank in ranks if own[rank] == words] for words in dict.fromkeys(own[rank] for rank in ranks)
    }
    text = "; ".join(f"rank{'s' * (len(some) > 1)} {join_numbers(some)}: {words}" for words, some in alike.items())
    return [replace(known[0], rank=None, ranks=() if every else ranks, detail=text)]


def of_no_known_norm(evidence: Evidence) -> tuple[str, ...]:
    """Describe a wrong norm beside right gradients without a cause from ``norm``."""
    text = "the norm matches no known norm of the compared gradients: {}; it is formed in another way, or "
    text += "gradients were changed after they were compared and before it was formed"
    return tuple(text.format(describe_mismatches([one])) for one in _wrong(evidence)[:1])


def _wrong(evidence: Evidence) -> list[Mismatch]:
    """Wrong norms beside right gradients."""
    return [] if any(map(evidence.differs, ("gradient", "presence"))) else mismatches_of("grad-norm", evidence)


def _name_norm(value: float, right: float, evidence: Evidence, rank: int | None) -> Candidate | None:
    """Identify the norm; ``rank``: the only one that has it."""
    scale = 1.0 if evidence.scale is None else evidence.scale.losses
    scaled = (
        [Candidate(f"{scale:g} times the right one, which is the loss scale", right * scale)] if scale != 1.0 else []
    )
    return find_candidate(value, scaled, ALIKE) or find_candidate(value, _candidates(evidence, right, rank))


def _candidates(evidence: Evidence, right: float, rank: int | None) -> Iterator[Candidate]:
    """Yield norms that a step may compute by mistake; ``rank``: the only rank with the value."""
    sizes, number = evidence.sizes, evidence.number
    by_stage = {s: _root(size for (own, _), size in sizes.items() if own == s) for s in range(evidence.stages)}
    ranks = {*evidence.placement}
    by_rank = [_root(by_stage[s] for s in by_stage if evidence.placement[s] == one) for one in sorted(ranks)]
    held = None if rank is None else evidence.held_sites(rank)  # a value that all ranks share is no rank's own
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
    before = () if evidence.run is None else evidence.run.ranks[rank or 0][:number]
    yield from (Candidate("that of an earlier step", one.norm) for one in before if one.norm is not None)
    yield from round_candidates(right)


def _clipping_factor(norm: float, evidence: Evidence) -> float:
    """Compute a parameter's relative movement after clipping by ``norm``."""
    return clip_factor(evidence, norm) / clip_factor(evidence, evidence.expected.norm)


def _root(sizes: Iterable[float]) -> float:
    return math.sqrt(math.fsum(size**2 for size in sizes))
