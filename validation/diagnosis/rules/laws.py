"""Links that the laws themselves judge: who holds what, what ran and how, and what forwards left behind."""

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from pipeline.action import GIVES_WEIGHT_GRADIENT, Kind
from validation.cause import Cause
from validation.diagnosis.address import agrees
from validation.diagnosis.evidence import Evidence
from validation.diagnosis.facts import Facts
from validation.diagnosis.rules.update import clip_factor, learning_rate
from validation.recording import Site
from validation.verdict import Mismatch

_LARGE = 10.0  # a parameter as small as its update says nothing of what it was before
_DERIVED = 1e-2  # a relative error that no doubt about the update reaches; weights drawn otherwise differ by far more


def partition(evidence: Facts) -> list[Cause]:
    """Parameters that no stage holds, or several."""
    found = [m for m in evidence.verdict.mismatches if m.law == "parameters-once"]
    if not found:
        return []
    first = found[0]
    detail = f"{first.seen}, expected {first.expected}; {len(found)} parameters"
    return [Cause("partition", stage=first.stage, parameter=first.parameter, detail=detail)]


def weights(evidence: Evidence) -> list[Cause]:
    """Parameters that a stage began with and that are not the model's."""
    for number in evidence.concerned:
        recording, model = evidence.observed.recording(number), evidence.played[number].model
        known = {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}
        began = recording.parameters if recording is not None else _began(evidence, number)
        limit = evidence.limit if recording is not None else _DERIVED
        wrong = {site: seen for site, seen in sorted(began.items()) if not _same(known.get(site[1]), seen, limit)}
        if wrong:
            return [_weights(evidence, number, wrong, known)]
    return []


def _began(evidence: Evidence, number: int) -> dict[Site, Tensor]:
    """What nobody recorded: the parameters that an operation began with are those that the one before left.

    Before the first, they follow from what the update left, for that is linear in the gradient. Other ones show in the
    losses, so where these are right there is nothing to look for.
    """
    updates = [k for k in range(number) if evidence.case.plan[k] == "train"]
    if updates:
        return evidence.observed.parameters(updates[-1])
    norm = evidence.observed.ranks[0][number].norm
    if not evidence.differs("loss") or evidence.case.plan[number] != "train" or not norm or norm != norm:
        return {}
    factor, rate = clip_factor(evidence, norm), learning_rate()
    gradients = evidence.observed.gradients(number)
    return {
        site: left + rate * factor * gradient
        for site, left in evidence.observed.parameters(number).items()
        if (gradient := gradients.get(site)) is not None and left.norm() > _LARGE * rate * factor * gradient.norm()
    }


def _weights(evidence: Evidence, number: int, wrong: Mapping[Site, Tensor], known: Mapping[str, Tensor]) -> Cause:
    (stage, name), seen = next(iter(wrong.items()))
    other = next(
        (key for key, tensor in known.items() if key != name and _same(tensor, seen, 0.0) and tensor.any()), None
    )
    kind, detail = ("randomness", "drawn otherwise") if number == 0 else ("update", "no operation left these")
    earlier = [one.model.get_parameter(name).detach() for one in evidence.played[:number]]
    if any(_same(one, seen, 0.0) for one in earlier):
        kind, detail = "stale-tensor", "those of an earlier operation"
    # Norms and biases begin alike in every layer: they are nobody's in particular.
    if other is not None and seen.std() > 0:
        kind, detail = "partition", f"those of {other}"
    stages = {of for of, _ in wrong}
    one = len(stages) == 1
    return Cause(
        kind,
        rank=evidence.observed.schedule.placement[stage] if one else None,
        stage=stage if one else None,
        parameter=name if len(wrong) == 1 else None,
        detail=f"operation {number + 1} began with other parameters: {name} has {detail}; {len(wrong)} parameters",
    )


def _same(one: Tensor | None, other: Tensor, limit: float) -> bool:
    return one is not None and agrees(other, one.cpu(), limit)


def calls(evidence: Facts) -> list[Cause]:
    """Modules that ran in the wrong mode, and microbatches that ran never or twice."""
    return modes(evidence) or counts(evidence)


def modes(evidence: Facts) -> list[Cause]:
    """Modules that ran in the wrong mode."""
    found = [m for m in evidence.verdict.mismatches if m.law == "microbatches" and m.seen.endswith("mode")]
    return [_at(found, "mode", f"{found[0].seen}, expected {found[0].expected}")] if found else []


def counts(evidence: Facts) -> list[Cause]:
    """Microbatches that ran never or twice."""
    found = [m for m in evidence.verdict.mismatches if m.law == "microbatches"]
    ran = _ran(evidence)
    causes = []
    for kind, wrong in (("dropped", [c for c in ran if c[3] == 0]), ("doubled", [c for c in ran if c[3] > 1])):
        if wrong:
            stage, name, _, times = wrong[0]
            microbatches = tuple(sorted({m for s, n, m, _ in wrong if (s, n) == (stage, name)}))
            detail = f"its {name} ran {times} times"
            rank = evidence.observed.schedule.placement[stage]
            causes.append(Cause(kind, rank=rank, stage=stage, microbatches=microbatches, detail=detail))
    if not causes and found:
        causes.append(_at(found, "order", f"{found[0].seen}, expected {found[0].expected}"))
    return causes


def buffers(evidence: Facts) -> list[Cause]:
    """State that forwards leave behind."""
    found = [m for m in evidence.verdict.mismatches if m.law == "buffers"]
    if not found:
        return []
    return [_at(found, "buffers", f"{found[0].seen}, expected {found[0].expected}{found[0].allowance}")]


def _ran(evidence: Facts) -> list[tuple[int, str, int, int]]:
    """(stage, forward or backward, microbatch, how often) of what did not run once."""
    number = evidence.number
    ran: Counter[tuple[int, str, int]] = Counter()
    for rank in evidence.observed.ranks:
        for stage, kind, microbatch in rank[number].executed:
            if kind is Kind.FORWARD or kind in GIVES_WEIGHT_GRADIENT:
                ran[stage, "forward" if kind is Kind.FORWARD else "backward", microbatch] += 1
    names = ("forward",) if evidence.operation == "eval" else ("forward", "backward")
    stages = [s for s in range(evidence.stages) if s not in evidence.unseen]
    due = [(s, n, m) for n in names for s in stages for m in range(evidence.microbatches)]
    return [(*key, ran[key]) for key in due if ran[key] != 1]


def _at(found: list[Mismatch], kind: str, detail: str) -> Cause:
    """A cause at the first mismatch; at no stage in particular where all have it."""
    first, stages = found[0], {mismatch.stage for mismatch in found}
    more = f" ({len(found)} places)" if len(found) > 1 else ""
    one = len(stages) == 1
    return Cause(
        kind,
        rank=first.rank if one else None,
        stage=first.stage if one else None,
        parameter=first.parameter if len(found) == 1 else None,
        detail=detail + more,
    )
