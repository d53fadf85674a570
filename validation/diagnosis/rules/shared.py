"""What is wrong between ranks that have a stage in common, or a copy of one parameter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeproof.diagnosis.atoms import Term
from pipeproof.diagnosis.attribution import attribute
from pipeproof.diagnosis.combination import limit_of, residual_of
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.known import Terms
from pipeproof.diagnosis.likeness import counted
from pipeproof.diagnosis.members import Members, Replicas, Stage
from pipeproof.judging.cause import Cause
from pipeproof.judging.tolerance import error, scalar_error
from pipeproof.reference.step import Expected

_ALIKE = 1e-3  # no verdict hangs on it


def shared(evidence: Evidence) -> list[Cause]:
    """The likeliest of what is wrong between ranks; of a record, each that its copies tell."""
    if evidence.members is None:
        return _of_copies(evidence)
    told = [
        _placed(one.cause, evidence)
        for one in evidence.members.found
        if one.law in ("replicas", "gradient") and evidence.differs(one.law) and not _of_losses(one.cause, evidence)
    ]
    unmet = [cause for cause in told if cause.kind == told[0].kind == "not-reduced"]  # each stage by itself
    if unmet or told or not evidence.differs("replicas"):
        return unmet or told[:1]
    members = evidence.members
    return unreduced(members, evidence.expected) or members.adding_up() or _of_single_ranks(evidence, members)


def _of_single_ranks(evidence: Evidence, members: Members) -> list[Cause]:
    """What each rank's own gradients are made of, where ranks with one stage differ; none if any of them tells nothing.

    Each turn takes another rank of every stage.
    """
    if evidence.due is None or any(part.shards for stage in members.stages for _, part in stage.part.members):
        return []
    update, found = evidence.due.update, dict[Cause, list[int]]()
    turns = max(len(stage.part.members) for stage in members.stages)
    for turn in range(turns):
        taken = [stage.part.members[min(turn, len(stage.part.members) - 1)] for stage in members.stages]
        ranks = tuple(rank for rank, _ in taken)
        own = {
            (stage.index, name): part.gradients[k]
            for stage, (_, part) in zip(members.stages, taken, strict=True)
            for k, name in stage.names.items()
        }
        own |= {site: update.observed[site] for site in update.shared}
        made = attribute(replace(update, observed=own, placement=ranks))
        if made.unknown:
            return []
        for cause in made.causes:
            found.setdefault(cause, []).extend(ranks)
    return [cause if cause.rank is not None else _on(ranks, cause, members) for cause, ranks in found.items()]


def _on(ranks: Sequence[int], cause: Cause, members: Members) -> Cause:
    """``cause``, which is in several stages, with the ranks that it is on where these are not all."""
    on = sorted({*ranks})
    if len(on) == len(members.norms):
        return cause
    return replace(cause, detail="; ".join(filter(None, (cause.detail, f"on ranks {_listed(on)} alone"))))


def apart(evidence: Evidence) -> Sequence[str]:
    """That ranks do not agree, and nothing says why; empty where they do."""
    told = "what ranks have of one stage does not go together, in a way that tells nothing"
    return (told,) if evidence.differs("replicas") or evidence.differs("shards") else ()


def on_rank(cause: Cause, evidence: Evidence) -> Cause:
    """``cause`` on the rank that had what is wrong, where several hold the stage and its place alone was known."""
    single = evidence.differs("replicas") and cause.action is None and cause.kind not in ("mode", "order")
    if cause.stage is None or single or cause.kind in ("not-reduced", "misplaced", "norm", "report"):
        return cause  # told of a rank, not of a stage
    if evidence.members is None or cause.rank != evidence.placement[cause.stage]:
        return cause
    return replace(cause, rank=_rank_of(cause.stage, cause.microbatches, evidence))


def _rank_of(stage: int, microbatches: Sequence[int], evidence: Evidence) -> int | None:
    """The rank of ``stage``; where several hold it, the one that these microbatches were on, if that is one."""
    assert evidence.members is not None, "asked for only where there are members"
    replicas, passed = evidence.members.replicas, evidence.passed
    members = [rank for rank, _ in evidence.members.stages[stage].part.members]
    if len(members) < 2:
        return evidence.placement[stage]
    if replicas.count > 1:
        ran = {m: rank for rank in reversed(members) for m in replicas.share(rank)}
    else:
        ran = {m: r for m, r in passed[stage].ranks.items() if r is not None} if stage in passed else {}
    found = {ran.get(microbatch) for microbatch in microbatches}
    return found.pop() if len(found) == 1 else None


def _of_losses(cause: Cause, evidence: Evidence) -> bool:
    """Whether losses, too, are as many times too large as ``cause`` says of gradients: then no sum of theirs is why."""
    factor = _loss_factor(evidence) if cause.kind == "scale" else None
    return factor is not None and cause.factor is not None and abs(factor / cause.factor - 1) < _ALIKE


def _loss_factor(evidence: Evidence) -> float | None:
    """How many times what it should be every loss is; None where that is not one number."""
    rows, due = [row[evidence.number] for row in evidence.observed.ranks], evidence.expected
    pairs = [(one, due.losses[m]) for row in rows for m, one in zip(row.share or (), row.losses, strict=False)]
    pairs += [(row.loss, due.loss) for row in rows if row.loss is not None]
    ratios = [seen / right for seen, right in pairs if right]
    if not ratios or any(scalar_error(ratio, ratios[0]) > _ALIKE for ratio in ratios):
        return None
    return ratios[0]


def _placed(cause: Cause, evidence: Evidence) -> Cause:
    if cause.stage is None or cause.rank is not None or evidence.members is None:
        return cause
    several = len(evidence.members.stages[cause.stage].part.members) > 1
    return cause if several else replace(cause, rank=evidence.placement[cause.stage])


def _of_copies(evidence: Evidence) -> list[Cause]:
    """Copies of which each has a part of the gradient, and all the whole."""
    found: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for (name, stages), by_rank in ({} if evidence.sums is None else evidence.sums.copies).items():
        due, told = evidence.expected.gradients.get((stages[0], name)), ""
        given = [one for one in by_rank.values() if one is not None]
        if due is None or len(given) < len(by_rank) or any(one.shape != due.shape for one in given):
            continue
        parts = [one.double().cpu() for k, one in enumerate(given) if not any(torch.equal(one, o) for o in given[:k])]
        whole = torch.stack(parts).sum(dim=0)
        for what, one in (("sum", whole), ("mean", whole / len(parts))):
            if len(parts) > 1 and error(one, due.double().cpu()) < _ALIKE:
                told = f"ranks {', '.join(map(str, by_rank))} keep gradients of their own, and their {what} is expected"
        if told:
            found.setdefault((tuple(sorted(set(stages))), told), []).append(name)
    return [_apart(stages, told, names) for (stages, told), names in found.items()]


def _apart(stages: Sequence[int], told: str, names: Sequence[str]) -> Cause:
    kind, stage = ("not-reduced", stages[0]) if len(stages) == 1 else ("tied-not-summed", None)
    if len(names) == 1:
        return Cause(kind, stage=stage, parameter=names[0], detail=told)
    return Cause(kind, stage=stage, detail=f"{', '.join(names)}: {told}")


Counts = tuple[float, ...]  # how often each microbatch is in a gradient
Pattern = tuple[tuple[int, Counts], ...]  # by rank


@dataclass(frozen=True)
class _Copies:
    """One parameter's gradient on every rank that holds it, and what each microbatch gives (M, D)."""

    name: str
    seen: Mapping[int, Tensor]
    rows: Tensor
    limit: float

    def pattern(self) -> Pattern | None:
        """What each rank's is made of; None where that is not decided."""
        terms = {Term("pair", m, m): row for m, row in enumerate(self.rows)}
        found = {rank: counted(gradient, Terms(terms, {}), self.limit) for rank, gradient in self.seen.items()}
        if any(counts is None or len(counts) < len(self.rows) for counts in found.values()):
            return None
        return tuple((rank, tuple(c for _, c in counts or ())) for rank, counts in sorted(found.items()))

    def fits(self, pattern: Pattern) -> bool:
        """Whether it is made so on every rank."""
        known = dict(pattern)
        return known.keys() == self.seen.keys() and all(
            residual_of(gradient, self.rows, known[rank]) <= self.limit for rank, gradient in self.seen.items()
        )


def unreduced(members: Members, expected: Expected) -> list[Cause]:
    """A cause for each stage in which ranks lack microbatches of other replicas, and for its parameters if not all."""
    return [cause for stage in members.stages for cause in _of_stage(members, expected, stage)]


def _of_stage(members: Members, expected: Expected, stage: Stage) -> Iterator[Cause]:
    copies, replicas = list(_copies(members, expected, stage)), members.replicas
    ranks = tuple(sorted(rank for rank, _ in stage.part.members))
    every = range(replicas.microbatches)
    right: Pattern = tuple((rank, (1.0,) * len(every)) for rank in ranks)
    alone: Pattern = tuple((rank, tuple(float(m in replicas.share(rank)) for m in every)) for rank in ranks)
    mean: Pattern = tuple((rank, tuple(replicas.count * c for c in counts)) for rank, counts in alone)
    odd = [one for one in copies if not one.fits(right)]
    found = [pattern for one in odd if (pattern := one.pattern()) is not None]
    for pattern in dict.fromkeys([alone, mean, *found]):
        names = [one.name for one in odd if one.fits(pattern)]
        odd = [one for one in odd if one.name not in names]
        own = {rank: _own(rank, counts, replicas) for rank, counts in pattern}
        told = [_told(rank, counts, own[rank]) for rank, counts in pattern if set(counts) != {1.0}]
        apart = replicas.count > 1 or sorted(m for some in own.values() for m in some) == list(every)
        if names and told and all(told) and apart:
            whole = len(names) == len(copies)
            others = f" and {', '.join(names[1:])} are" if len(names) > 1 and not whole else ""
            detail = f"{others} not reduced over all replicas: {', '.join(told)}".lstrip()
            name = None if whole else names[0]
            yield Cause("not-reduced", stage=stage.index, parameter=name, detail=detail)


def _copies(members: Members, expected: Expected, stage: Stage) -> Iterator[_Copies]:
    """The parameters that every rank holds whole."""
    for k, name in stage.names.items():
        site, holders = (stage.index, name), stage.part.members
        given = [one.gradients.get(site) for one in members.contributions]
        parts = [gradient.double().cpu().flatten() for gradient in given if gradient is not None]
        holders = [(rank, part) for rank, part in holders if k not in part.lacks]
        seen = {rank: part.gradients[k] for rank, part in holders if k not in part.shards}
        flat = {rank: gradient.double().cpu().flatten() for rank, gradient in seen.items() if gradient is not None}
        if len(parts) == len(given) and len(flat) == len(holders):
            rows = torch.stack(parts)
            due = expected.gradients[site]
            assert due is not None, "every microbatch has one"
            if all(one.shape == rows[0].shape and bool(one.isfinite().all()) for one in flat.values()):
                yield _Copies(name, flat, rows, limit_of(due.cpu().flatten(), rows.sum(dim=0)))


def _own(rank: int, counts: Counts, replicas: Replicas) -> set[int]:
    """A rank's own microbatches; where ranks are no replicas of each other, those that its gradient has in it."""
    return set(replicas.share(rank)) if replicas.count > 1 else {m for m, c in enumerate(counts) if c}


def _told(rank: int, counts: Counts, own: set[int]) -> str:
    """What a rank lacks of other replicas, in words; empty if that is not all that is wrong."""
    lacking = [m for m, c in enumerate(counts) if c == 0]
    more = {m: c for m, c in enumerate(counts) if c not in (0.0, 1.0)}
    if not lacking or own & set(lacking) or not own >= set(more):
        return ""
    if set(lacking) | own == set(range(len(counts))):
        return f"rank {rank} has the gradient of its own microbatches {_listed(sorted(own))} alone"
    several = len(lacking) > 1
    times = "".join(f" and has its own {m} {c:.4g} times" for m, c in more.items())
    added = f"reduced before {'they were' if several else 'it was'} added"
    return f"rank {rank} lacks microbatch{'es' * several} {_listed(lacking)} of other replicas{times}: {added}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
