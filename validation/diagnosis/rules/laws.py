"""Links that the laws themselves judge: who holds what, what ran and how, and what forwards left behind."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeproof.core.cause import Cause, listed
from pipeproof.core.limits import precision_of
from pipeproof.core.tolerance import agrees, error, same_bits
from pipeproof.core.verdict import Mismatch
from pipeproof.diagnosis.evidence import Due, Evidence
from pipeproof.diagnosis.interference import became, common_change
from pipeproof.diagnosis.limits import HALF, LEFT, LITTLE, MANY, ROUNDINGS, SHORT
from pipeproof.diagnosis.rules.cut import cut
from pipeproof.diagnosis.rules.repeated import backed_again, rearranged, repeated
from pipeproof.diagnosis.rules.update import clip_factor, learning_rate
from pipeproof.observers.recording import Recording, Site
from pipeproof.pipeline.action import GIVES_WEIGHT_GRADIENT, Kind


def partition(evidence: Evidence) -> list[Cause]:
    """Parameters that no stage holds, or several; nothing where they may only be called otherwise."""
    found = [m for m in evidence.verdict.mismatches if m.law == "parameters-once"]
    if not found or evidence.strange:
        return []
    first = found[0]
    detail = f"{first.seen}, expected {first.expected}; {len(found)} parameters"
    return [Cause("partition", stage=first.stage, parameter=first.parameter, detail=detail)]


def nameless(evidence: Evidence) -> Sequence[str]:
    """That names may be others; empty where all are known."""
    told = f"parameters of the step and of the reference do not go together: {evidence.renamed_by} says which is which"
    return (told,) if evidence.strange else ()


def weights(evidence: Evidence) -> list[Cause]:
    """Parameters that a stage began with and that are not the model's, or that moved while the step ran."""
    if evidence.due is not None:
        return _other_weights(evidence, evidence.due)
    for number in evidence.concerned:
        recording, model = evidence.observed.recording(number), evidence.played[number].model
        known = {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}
        began = recording.parameters if recording is not None else _began(evidence, number)
        limit = LEFT if recording is None else evidence.limit if "train" in evidence.setup.plan[:number] else 0.0
        wrong = {site: seen for site, seen in sorted(began.items()) if not _same(known.get(site[1]), seen, limit)}
        if wrong:
            earlier = [one.model.get_parameter(next(iter(wrong))[1]).detach() for one in evidence.played[:number]]
            return _weights(evidence, f"operation {number + 1}", wrong, known, earlier)
        moved = {} if recording is None else _moved(recording)
        if moved:
            return [_while_running(evidence, number, moved)]
    return []


def other_weights(evidence: Evidence) -> Sequence[str]:
    """That a stage began with other parameters, and nothing says with which; empty where it did not."""
    told = "the weights differ before the step, in a way that tells nothing"
    return (told,) if evidence.differs("initial-weights") else ()


def _other_weights(evidence: Evidence, due: Due) -> list[Cause]:
    wrong = {(m.stage, m.parameter) for m in evidence.verdict.mismatches if m.law == "initial-weights"}
    seen = {site: value for site, value in sorted(evidence.observed.before(evidence.number).items()) if site in wrong}
    seen = {site: value for site, value in seen.items() if not same_bits(value, due.weights[site[1]])}
    number = min((m.operation for m in evidence.verdict.mismatches if m.law == "initial-weights"), default=1)
    what = f"operation {number}" if number > 1 else "the step"

    def told(begun: Mapping[Site, Tensor]) -> list[Cause]:
        (_, first), *_ = begun
        return _weights(evidence, what, begun, due.weights, [one[first].cpu() for one in evidence.earlier_weights])

    if seen:
        return told(seen)
    elsewhere = _begun_elsewhere(evidence).items()
    return [replace(cause, rank=rank) for rank, begun in elsewhere for cause in told(begun)]


def _begun_elsewhere(evidence: Evidence) -> dict[int, dict[Site, Tensor]]:
    """With what ranks began that hold a stage beside another rank, and not with its weights."""
    wrong = {(m.rank, m.stage, m.parameter) for m in evidence.verdict.mismatches if m.law == "initial-weights"}
    found: dict[int, dict[Site, Tensor]] = {}
    for stage in () if evidence.members is None else evidence.members.stages:
        for rank, part in stage.part.members:
            for k, value in part.values.items():
                name = stage.names.get(k, "")
                if (rank, stage.index, name) in wrong:
                    found.setdefault(rank, {})[stage.index, name] = value
    return found


def _moved(recording: Recording) -> dict[Site, float]:
    """How far, relative to their size, parameters were from what they began as when the last backward was over.

    What was changed and changed back may be off by a few roundings.
    """
    pairs = {site: (after, recording.parameters.get(site)) for site, after in sorted(recording.ended.items())}
    far = {site: error(after, began) for site, (after, began) in pairs.items() if began is not None}
    return {site: gap for site, gap in far.items() if gap > ROUNDINGS * precision_of(recording.ended[site].dtype).unit}


def _while_running(evidence: Evidence, number: int, moved: Mapping[Site, float]) -> Cause:
    stages = sorted({stage for stage, _ in moved})
    # What began as zero moved by any number of times its size.
    (stage, name), gap = max(moved.items(), key=lambda item: item[1] if math.isfinite(item[1]) else 0.0)
    several = len(stages) > 1
    return Cause(
        "update",
        rank=None if several else evidence.placement[stage],
        stage=None if several else stage,
        parameter=name if len(moved) == 1 else None,
        detail=f"parameters moved between the microbatches of operation {number + 1}, before the optimizer: "
        f"{name} by {gap:.2g} of its size; {len(moved)} parameters",
    )


def _began(evidence: Evidence, number: int) -> dict[Site, Tensor]:
    """What nobody recorded: the parameters that an operation began with are those that the one before left.

    Before the first, they follow from what the update left, for that is linear in the gradient. Other ones show in the
    losses, so where these are right there is nothing to look for.
    """
    updates = [k for k in range(number) if evidence.setup.plan[k] == "train"]
    if updates:
        return evidence.observed.parameters(updates[-1])
    norm = evidence.observed.ranks[0][number].norm
    if not evidence.differs("loss") or evidence.setup.plan[number] != "train" or not norm or norm != norm:
        return {}
    factor, rate = clip_factor(evidence, norm), learning_rate()
    gradients = evidence.observed.gradients(number)
    return {
        site: left + rate * factor * gradient
        for site, left in evidence.observed.parameters(number).items()
        if (gradient := gradients.get(site)) is not None and LITTLE * left.norm() > rate * factor * gradient.norm()
    }


def _weights(
    evidence: Evidence,
    what: str,
    wrong: Mapping[Site, Tensor],
    known: Mapping[str, Tensor],
    earlier: Sequence[Tensor],
) -> list[Cause]:
    stage, name = next(iter(wrong))
    told = _became(wrong, known, earlier, as_left=evidence.due is not None)
    stages = {of for of, _ in wrong}
    one = len(stages) == 1
    began = [m for m in evidence.verdict.mismatches if m.law == "initial-weights" and m.beside is None]
    ranks = {m.rank for m in began if (m.stage, m.parameter) in wrong} or {evidence.placement[stage]}
    return [
        Cause(
            kind,
            rank=ranks.pop() if one and len(ranks) == 1 else None,
            stage=stage if one else None,
            parameter=name if len(wrong) == 1 else None,
            detail=f"{what} began with other parameters: {name} has {detail}; {len(wrong)} parameters",
        )
        for kind, detail in ([] if told is None else [told])
    ]


def _became(
    wrong: Mapping[Site, Tensor], known: Mapping[str, Tensor], earlier: Sequence[Tensor], *, as_left: bool
) -> tuple[str, str] | None:
    """What kind of parameters those are in place of the ``known`` ones, told by the first of them, and by all.

    ``earlier``: what the first was before every operation up to this one. ``as_left``: the known ones are what the
    operation before left, so that no update is to blame. None where too little is wrong to tell.
    """
    (_, name), seen = next(iter(wrong.items()))
    other = next(
        (key for key, tensor in known.items() if key != name and _same(tensor, seen, 0.0) and tensor.any()), None
    )
    # Norms and biases begin alike in every layer: they are nobody's in particular.
    if other is not None and seen.std() > 0:
        return "partition", f"those of {other}"
    if any(_same(one, seen, 0.0) for one in earlier):
        return "stale-tensor", "those of an earlier operation"
    pairs = {site: (seen, due.cpu()) for site, seen in wrong.items() if (due := known.get(site[1])) is not None}
    moved = {site[1]: moved_along(*pair) for site, pair in pairs.items()}
    if moved and all(moved.values()):
        return "misplaced", moved[name]
    changes = {site[1]: became(site, due, seen) for site, (seen, due) in pairs.items()}
    change = common_change(changes, {name: seen for (_, name), (seen, _) in pairs.items()})
    if change.kind in ("rounded", "not-finite"):
        return change.kind, f"its own, {change.text}"
    if earlier and as_left:
        return "altered", f"its own, {change.text}, after the operation before had left it"
    if earlier:
        return "update", "what no operation left"
    if any(one is not None and one.is_known for one in changes.values()):
        return "altered", f"its own, {change.text}"
    drawn = ("randomness", "drawn otherwise") if sum(seen.numel() for seen in wrong.values()) >= MANY else None
    return _related(wrong, known) or drawn


def _related(wrong: Mapping[Site, Tensor], known: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Whether they are the ``known`` ones but for a change: what was drawn otherwise has nothing to do with them."""
    pairs = [(seen, due.cpu()) for (_, name), seen in wrong.items() if (due := known.get(name)) is not None]
    if not pairs or any(seen.shape != due.shape for seen, due in pairs):
        return None
    # What begins as ones or zeros everywhere is alike however it was drawn.
    drawn = [
        (seen.flatten().double(), due.flatten().double()) for seen, due in pairs if due.numel() > 1 and due.std() > 0
    ]
    if not drawn:
        return "altered", "not its own, which are no random numbers"
    begun, due = (torch.cat(column) for column in zip(*drawn, strict=True))
    likeness = float(torch.nn.functional.cosine_similarity(begun, due, dim=0))
    return ("altered", f"its own up to a relative error of {error(begun, due):.2g}") if likeness > HALF else None


def _same(one: Tensor | None, other: Tensor, limit: float) -> bool:
    return one is not None and agrees(other, one.cpu(), limit)


def calls(evidence: Evidence) -> list[Cause]:
    """What ran in the wrong mode, with another's tensors, or for some microbatches never or twice."""
    found = modes(evidence) or repeated(evidence) or backed_again(evidence)
    countable = all(flow.complete for flow in evidence.passed.values()) and not rearranged(evidence)
    return found or (counts(evidence) if countable else [])


def modes(evidence: Evidence) -> list[Cause]:
    """Modules that ran in the wrong mode."""
    found = [m for m in evidence.verdict.mismatches if m.law == "microbatches" and m.what == "mode"]
    if not found:
        return []
    cause = _at(evidence, found, "mode", f"{found[0].seen}, expected {found[0].expected}")
    flow = None if found[0].stage is None else evidence.passed.get(found[0].stage)
    called = [] if flow is None else flow.called
    wrong = [action for action, training in called if training != (found[0].expected == "training mode")]
    if not wrong or len(wrong) == len(called):
        return [cause]
    return [replace(cause, microbatches=tuple(sorted({one.microbatch for one in wrong})), action=str(wrong[0]))]


def counts(evidence: Evidence) -> list[Cause]:
    """Microbatches that ran never or twice."""
    found = [m for m in evidence.verdict.mismatches if m.law == "microbatches"]
    lost = cut(evidence)
    ran = [one for one in _ran(evidence) if not any(_behind(one, cause) for cause in lost)]
    causes = lost + [
        _ran_otherwise(evidence, kind, wrong)
        for kind, wrong in (("dropped", [c for c in ran if c[3] == 0]), ("doubled", [c for c in ran if c[3] > 1]))
        if wrong
    ]
    if not causes and found:
        causes.append(_at(evidence, found, "order", f"{found[0].seen}, expected {found[0].expected}"))
    return causes


def _behind(ran: tuple[int, str, int, int], cut_off: Cause) -> bool:
    """Whether a backward did not run to which ``cut_off`` left nothing."""
    stage, name, microbatch, times = ran
    before = cut_off.stage is not None and stage < cut_off.stage
    return (name, times) == ("backward", 0) and before and microbatch in cut_off.microbatches


def _ran_otherwise(evidence: Evidence, kind: str, wrong: Sequence[tuple[int, str, int, int]]) -> Cause:
    """Where it happened first along the flow: forwards go up the stages, backwards down."""
    name = wrong[0][1]
    alike: dict[int, tuple[int, ...]] = {}
    for stage, other, microbatch, _ in wrong:
        if other == name:
            alike[stage] = (*alike.get(stage, ()), microbatch)
    first = (min if name == "forward" else max)(alike)
    also = [stage for stage in sorted(alike) if stage != first and alike[stage] == alike[first]]
    whole = len(also) + 1 == evidence.stages > 1
    times = sorted({times for stage, other, _, times in wrong if (stage, other) == (first, name)})
    whose = f"their {name}s" if len(alike[first]) > 1 else f"its {name}"
    detail = f"{whose} ran {' or '.join(map(str, times))} times{' each' * (len(alike[first]) > 1)}"
    flow = evidence.passed.get(first)
    if times == [0] and name == "backward" and flow is not None and all(map(flow.detached.get, alike[first])):
        detail += f"; what stage {first - 1} made with requires_grad came without it"
    return Cause(
        kind,
        rank=None if whole else evidence.placement[first],
        stage=None if whole else first,
        microbatches=alike[first],
        detail=detail + (f", and so at stage{'s' * (len(also) > 1)} {listed(also)}" if also and not whole else ""),
    )


def no_update(evidence: Evidence) -> list[Cause]:
    """What an operation without an update changed: weights, or where it is an evaluation, gradients."""
    kinds = {"presence": ("unexpected", "an evaluation ran backwards")} if evidence.operation == "eval" else {}
    if evidence.operation != "train":
        kinds["updated-parameters"] = "weights-changed", f"by an operation that updates none: {evidence.operation}"
    found = {law: [m for m in evidence.verdict.mismatches if m.law == law] for law in kinds}
    return [_at(evidence, found[law], *kinds[law]) for law in kinds if found[law]]


def buffers(evidence: Evidence) -> list[Cause]:
    """State that forwards leave behind."""
    found = [m for m in evidence.verdict.mismatches if m.law == "buffers"]
    if not found:
        return []
    return [_at(evidence, found, "buffers", f"{found[0].seen}, expected {found[0].expected}{found[0].allowance}")]


def _ran(evidence: Evidence) -> list[tuple[int, str, int, int]]:
    """(stage, forward or backward, microbatch, how often) of what did not run once."""
    number = evidence.number
    ran: Counter[tuple[int, str, int]] = Counter()
    for stage, kind, microbatch in evidence.observed.executed(number):
        if kind is Kind.FORWARD or kind in GIVES_WEIGHT_GRADIENT:
            ran[stage, "forward" if kind is Kind.FORWARD else "backward", microbatch] += 1
    names = ("forward",) if evidence.operation == "eval" else ("forward", "backward")
    judged = {mismatch.stage for mismatch in evidence.verdict.mismatches if mismatch.law == "microbatches"}
    stages = [s for s in range(evidence.stages) if s not in evidence.unseen and s in judged]
    due = [(s, n, m) for n in names for s in stages for m in range(evidence.microbatches)]
    return [(*key, ran[key]) for key in due if ran[key] != 1]


def _at(evidence: Evidence, found: Sequence[Mismatch], kind: str, detail: str) -> Cause:
    """A cause at the stages and on the rank of all that is wrong; at none in particular where all have it."""
    first, stages = found[0], sorted({mismatch.stage for mismatch in found if mismatch.stage is not None})
    ranks = {mismatch.rank for mismatch in found}
    more = f" ({len(found)} places)" if len(found) > 1 else ""
    return Cause(
        kind,
        rank=first.rank if len(ranks) == 1 else None,
        stage=stages[0] if len(stages) == 1 else None,
        parameter=first.parameter if len(found) == 1 else None,
        detail=detail + more,
        stages=tuple(stages) if 1 < len(stages) < evidence.stages else (),
    )


_LINES = ("rows", "columns")


def moved_along(seen: Tensor, due: Tensor) -> str:
    """In words, which rows or columns of ``due`` lie in the place of others in ``seen``; empty where none do."""
    if seen.shape != due.shape or seen.dim() not in (1, 2):
        return ""
    for dim, lines in enumerate(_LINES[: seen.dim()]):
        found = _moved_lines(seen.transpose(0, dim), due.transpose(0, dim))
        if found is not None:
            start, stop, other = found
            own = f"its {lines} {other} to {other + stop - start - 1} in the place of {start} to {stop - 1}"
            return own if seen.dim() == 2 else own.replace(lines, "elements")
    return ""


def _moved_lines(seen: Tensor, due: Tensor) -> tuple[int, int, int] | None:
    """From where to where lines differ, and where in ``due`` those begin that are there; None where none are."""
    apart = (seen != due).reshape(len(seen), -1).any(1).nonzero().flatten()
    if not len(apart):
        return None
    start, stop = int(apart[0]), int(apart[-1]) + 1
    part = seen[start:stop]
    if part.numel() < SHORT or not part.any():
        return None
    for other in range(len(due) - len(part) + 1):
        if other != start and bool((due[other : other + len(part)] == part).all()):
            return start, stop, other
    return None
