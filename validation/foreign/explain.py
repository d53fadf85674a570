"""From a foreign step that is wrong to the fault that explains it: the links of ``diagnose``, as far as they show."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from validation.diagnosis.diagnose import followed
from validation.diagnosis.rules.attributed import named
from validation.diagnosis.rules.laws import counts, modes, partition
from validation.diagnosis.rules.norm import other_norm
from validation.foreign.passages import passages, sound, unexplained_passage
from validation.foreign.repeated import rearranged, repeated
from validation.foreign.reported import reported, unreported
from validation.foreign.step_facts import StepFacts
from validation.foreign.unreduced import unreduced
from validation.judging.cause import Cause
from validation.judging.tolerance import error, same_bits
from validation.judging.verdict import Verdict
from validation.observers.identity import NARROWER

Link = Callable[[StepFacts], list[Cause]]

_MANY = 64  # numbers of which it is no chance that they have nothing to do with each other
_RELATED = 0.5  # cosine
_OF_RANKS = ("not-reduced", "misplaced", "norm", "report")  # told of a rank, not of a stage


def explained(facts: StepFacts) -> Verdict:
    """The verdict with its causes, the likeliest first; none where the evidence does not decide."""
    if facts.verdict.verdict == "pass" or not facts.verdict.mismatches:
        return facts.verdict
    found = followed(facts.verdict, facts, _links(facts), unexplained=lambda link: _left(link, facts))
    return replace(found, cause=tuple(_on_rank(cause, facts) for cause in found.cause))


def _on_rank(cause: Cause, facts: StepFacts) -> Cause:
    """``cause`` on the rank that had what is wrong, where several hold the stage and its place alone was known."""
    if cause.stage is None or cause.kind in _OF_RANKS or cause.rank != facts.observed.schedule.placement[cause.stage]:
        return cause
    return replace(cause, rank=facts.rank_of(cause.stage, cause.microbatches))


def _links(facts: StepFacts) -> Mapping[Link, str]:
    """The links that this step shows; and what it means that one is sound."""
    watched = len(facts.unseen) < facts.stages
    whole = not any(flow.untold for flow in facts.passed.values())
    ordered = "order, mode: every watched stage ran once each way for each microbatch, in the right mode"
    if not _orderly(facts):
        ordered = "order, mode: where a stage ran otherwise, its gradients are right"
    passed = bool(facts.observed.crossings(0))
    links: list[tuple[Link, str, bool]] = [
        (held, "partition: every parameter is held once", True),
        (weights, "weights: every stage began with the model's parameters", not facts.found.nameless),
        (ran, ordered if whole else "mode: every watched stage ran in the right mode", watched),
        (passages, sound(facts) if passed else "", passed),
        (shared, "replicas: ranks that have a stage in common agree", _in_common(facts)),
        (attributed, "gradients: they are made of what they should be", True),
        (norm, "norm: it is that of the gradients", any(row[0].norm is not None for row in facts.observed.ranks)),
        (reported, "report: what was reported is what was computed", True),
    ]
    return {link: text for link, text, shown in links if shown}


def _left(link: Link, facts: StepFacts) -> Sequence[str]:
    """What is wrong at a link that names no cause, where nothing behind it can be judged."""
    if link is held and facts.found.strangers:
        return ("parameters of the step and of the reference do not go together: names= says which is which",)
    if link is weights and facts.differs("initial-weights"):
        return ("the weights differ before the step, in a way that tells nothing",)
    if link is shared and (facts.differs("replicas") or facts.differs("shards")):
        return ("what ranks have of one stage does not go together, in a way that tells nothing",)
    if link is attributed and facts.unexplained:
        return (*unexplained_passage(facts), *facts.unexplained)
    if link is reported:
        return unreported(facts)
    return ()


def _in_common(facts: StepFacts) -> bool:
    return any(len(stage.part.members) > 1 for stage in facts.found.stages)


def _orderly(facts: StepFacts) -> bool:
    """Whether every watched stage ran as it should, or nobody knows better."""
    every, untold = list(range(facts.microbatches)), facts.unseen
    orders = [(facts.observed.forwards(0), untold), (facts.observed.backwards(0), {*untold, *facts.found.frozen})]
    once = all(sorted(order) == every for ran, left in orders for stage, order in ran.items() if stage not in left)
    return once and all(training for _, training in facts.observed.called(0))


def held(facts: StepFacts) -> list[Cause]:
    """Parameters that no stage holds, or several; nothing where they may only be called otherwise."""
    return [] if facts.found.strangers else partition(facts)


def ran(facts: StepFacts) -> list[Cause]:
    """What ran too often, too seldom, with another's tensors or in the wrong mode."""
    countable = all(flow.complete for flow in facts.passed.values()) and not rearranged(facts)
    return modes(facts) or repeated(facts) or (counts(facts) if countable else [])


def weights(facts: StepFacts) -> list[Cause]:
    """Parameters that a stage began with and that are not the model's."""
    wrong = {(m.stage, m.parameter) for m in facts.verdict.mismatches if m.law == "initial-weights"}
    seen = {site: value for site, value in sorted(facts.observed.before(0).items()) if site in wrong}
    known = {name: p.detach().cpu() for name, p in facts.model.named_parameters(remove_duplicate=False)}
    seen = {site: value for site, value in seen.items() if not same_bits(value, known[site[1]])}
    kind, detail = _began(seen, known) if seen else ("", "")
    if not kind:
        return []
    stages = {stage for stage, _ in seen}
    one = stages.pop() if len(stages) == 1 else None
    name = next(iter(seen))[1]
    return [
        Cause(
            kind,
            rank=None if one is None else facts.observed.schedule.placement[one],
            stage=one,
            parameter=name if len(seen) == 1 else None,
            detail=f"the step began with other parameters: {name} has {detail}; {len(seen)} parameters",
        )
    ]


def _began(seen: Mapping[tuple[int, str], Tensor], known: Mapping[str, Tensor]) -> tuple[str, str]:
    """The kind and the words of what the first of ``seen`` is in place of the known one; empty if nothing tells."""
    (_, name), value = next(iter(seen.items()))
    for other, tensor in known.items():
        if other != name and tensor.shape == value.shape and same_bits(tensor, value) and value.std() > 0:
            return "partition", f"those of {other}"
    for narrow, dtype in NARROWER.items():
        if torch.equal(known[name].to(dtype).to(value.dtype), value):
            return "rounded", f"its own, {narrow}-rounded"
    every = [(one.double().flatten(), known[site[1]].double().flatten()) for site, one in seen.items()]
    if any(one.shape != other.shape for one, other in every):
        return "", ""
    begun, due = (torch.cat(column) for column in zip(*every, strict=True))
    likeness = torch.nn.functional.cosine_similarity(begun, due, dim=0).item()
    if likeness > _RELATED:
        return "altered", f"a relative error of {error(value, known[name]):.2g}"
    return ("randomness", "numbers drawn otherwise") if begun.numel() >= _MANY else ("", "")


def shared(facts: StepFacts) -> list[Cause]:
    """What is wrong between ranks that have a stage in common."""
    told = [
        one.cause if one.cause.rank is not None or one.cause.stage is None else _placed(one.cause, facts)
        for one in facts.suspects.found
        if one.law in ("replicas", "gradient") and facts.differs(one.law) and not _of_losses(one.cause, facts)
    ][:1]
    return told or (unreduced(facts) if facts.differs("replicas") else [])


def _of_losses(cause: Cause, facts: StepFacts) -> bool:
    """Whether losses, too, are as many times too large as ``cause`` says of gradients: then no sum of theirs is why."""
    factor = facts.loss_factor if cause.kind == "scale" else None
    return factor is not None and cause.factor is not None and abs(factor / cause.factor - 1) < 1e-3


def _placed(cause: Cause, facts: StepFacts) -> Cause:
    assert cause.stage is not None, "asked for only where there is a stage"
    members = facts.found.stages[cause.stage].part.members
    return cause if len(members) > 1 else replace(cause, rank=facts.observed.schedule.placement[cause.stage])


def attributed(facts: StepFacts) -> list[Cause]:
    """The causes that attribution names, the likeliest with what the coefficients speak against."""
    return named(facts.attribution)


def norm(facts: StepFacts) -> list[Cause]:
    """A norm that is not that of the gradients, although these are right."""
    found = [m for m in facts.verdict.mismatches if m.law == "grad-norm"]
    if not found or any(map(facts.differs, ("gradient", "none-ness"))):
        return []
    told = [one.cause for one in facts.suspects.found if one.law == "grad-norm"]
    if told:
        return told[:1]
    return other_norm(facts, found)
