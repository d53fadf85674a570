"""From a foreign step that is wrong to the fault that explains it: the links of ``diagnose``, as far as they show."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from validation.diagnosis.rule import Rule, clears, followed
from validation.diagnosis.rules.laws import counts, modes, partition
from validation.diagnosis.rules.norm import other_norm
from validation.foreign.agreement import otherwise
from validation.foreign.passages import passages, sound, unexplained_passage
from validation.foreign.repeated import backed_again, rearranged, repeated
from validation.foreign.reported import reported, unreported
from validation.foreign.step_facts import StepFacts
from validation.foreign.unreduced import unreduced
from validation.judging.cause import Cause, RuledOut
from validation.judging.tolerance import error, same_bits
from validation.judging.verdict import Verdict
from validation.observers.identity import NARROWER

_MANY = 64  # numbers of which it is no chance that they have nothing to do with each other
_RELATED = 0.5  # cosine
_OF_RANKS = ("not-reduced", "misplaced", "norm", "report")  # told of a rank, not of a stage


def explained(facts: StepFacts) -> Verdict:
    """The verdict with its causes, the likeliest first; none where the evidence does not decide."""
    if facts.verdict.verdict == "pass" or not facts.verdict.mismatches:
        return facts.verdict
    found = followed(facts, RULES)
    return replace(
        found,
        cause=tuple(_on_rank(cause, facts) for cause in found.cause),
        alternatives=tuple(tuple(_on_rank(cause, facts) for cause in one) for one in found.alternatives),
    )


def _on_rank(cause: Cause, facts: StepFacts) -> Cause:
    """``cause`` on the rank that had what is wrong, where several hold the stage and its place alone was known."""
    if cause.stage is None or cause.kind in _OF_RANKS or cause.rank != facts.observed.schedule.placement[cause.stage]:
        return cause
    return replace(cause, rank=facts.rank_of(cause.stage, cause.microbatches))


def _nameless(facts: StepFacts) -> Sequence[str]:
    names = "parameters of the step and of the reference do not go together: names= says which is which"
    return (names,) if facts.found.unmatched else ()


def _other_weights(facts: StepFacts) -> Sequence[str]:
    told = "the weights differ before the step, in a way that tells nothing"
    return (told,) if facts.differs("initial-weights") else ()


def _apart(facts: StepFacts) -> Sequence[str]:
    told = "what ranks have of one stage does not go together, in a way that tells nothing"
    return (told,) if facts.differs("replicas") or facts.differs("shards") else ()


def _unexplained(facts: StepFacts) -> Sequence[str]:
    return (*unexplained_passage(facts), *facts.unexplained) if facts.unexplained else ()


def _watched(facts: StepFacts) -> bool:
    return len(facts.unseen) < facts.stages


def _passed(facts: StepFacts) -> bool:
    return bool(facts.observed.crossings(0))


def _normed(facts: StepFacts) -> bool:
    return any(row[0].norm is not None for row in facts.observed.ranks)


def _ran_right(facts: StepFacts) -> RuledOut | None:
    """Every stage was watched, and it is known of every call which microbatch it was about."""
    if facts.unseen or any(flow.untold for flow in facts.passed.values()) or not _orderly(facts):
        return None
    whole = "every stage ran once each way for each microbatch, in the right mode"
    return clears("microbatches", ("order", "mode"), whole)(facts)


def _beside(facts: StepFacts) -> Sequence[RuledOut]:
    return () if facts.attribution is None else facts.attribution.ruled_out


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
    return [] if facts.found.unmatched else partition(facts)


def ran(facts: StepFacts) -> list[Cause]:
    """What ran too often, too seldom, with another's tensors or in the wrong mode."""
    countable = all(flow.complete for flow in facts.passed.values()) and not rearranged(facts)
    return modes(facts) or repeated(facts) or backed_again(facts) or (counts(facts) if countable else [])


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
    """The causes that attribution names."""
    return [] if facts.attribution is None else list(facts.attribution.causes)


def norm(facts: StepFacts) -> list[Cause]:
    """A norm that is not that of the gradients, although these are right."""
    found = [m for m in facts.verdict.mismatches if m.law == "grad-norm"]
    if not found or any(map(facts.differs, ("gradient", "presence"))):
        return []
    told = [one.cause for one in facts.suspects.found if one.law == "grad-norm"]
    if told:
        return told[:1]
    return other_norm(facts, found)


RULES: tuple[Rule[StepFacts], ...] = (
    Rule(held, clears("parameters-once", ("partition",), "every parameter is held once"), left=_nameless),
    Rule(
        weights,
        clears("initial-weights", (), "every stage began with the model's parameters"),
        lambda facts: not facts.found.nameless,
        left=_other_weights,
    ),
    Rule(ran, _ran_right, _watched, otherwise=otherwise),
    Rule(passages, sound, _passed, otherwise=otherwise),
    Rule(shared, clears("replicas", ("not-reduced",), "ranks that have a stage in common agree"), _in_common, _apart),
    Rule(
        attributed,
        clears("gradient", ("scale", "sign", "dropped", "doubled"), "every gradient is what it should be"),
        left=_unexplained,
        beside=_beside,
    ),
    Rule(norm, clears("grad-norm", ("norm",), "the norm is that of the gradients"), _normed),
    Rule(reported, clears("loss", ("report",), "every reported loss is right"), left=unreported),
)
