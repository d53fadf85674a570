"""Wrong weights at the start of an operation, parameters in no stage, and tensors from an operation before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.core.observe.likeness import PARAMETER, Label
from pipeproof.core.observe.recording import Point, Site
from pipeproof.core.tolerance import agrees
from pipeproof.core.verdict import Mismatch
from pipeproof.explain.evidence import Evidence, RightOperation
from pipeproof.explain.known import Known
from pipeproof.explain.likeness import likeness
from pipeproof.explain.limits import HALF, MANY
from pipeproof.explain.rules.places import cause_of, describe_mismatches, mismatches_of


@dataclass(frozen=True)
class Start:
    """Initial weights of an operation, ``observed`` and ``expected``, with the mismatches ``found``.

    ``earlier``: initial weights of operations before, latest first.
    """

    found: Sequence[Mismatch]
    observed: Mapping[Site, Tensor]
    expected: Mapping[str, Tensor]
    earlier: Sequence[Mapping[str, Tensor]]


def weights(evidence: Evidence) -> list[Cause]:
    """Find wrong initial parameters on a stage."""
    start = _start_of_play(evidence) if evidence.right is None else _start_beside(evidence, evidence.right)
    if start is None:
        return []
    site = max(start.observed, key=lambda one: (start.observed[one].numel(), *one))  # the clearest evidence
    named = _name_weights(start, site)
    if named is None:
        return []
    kind, words = named
    number = start.found[0].operation
    when = f"operation {number}" if number > 1 else "the step"
    detail = f"{when} began with other parameters: {site[1]} has {words}; {len(start.observed)} parameters"
    return [cause_of(kind, start.found, evidence, detail=detail)]


def other_weights(evidence: Evidence) -> Sequence[str]:
    """Say that wrong initial parameters lack an explanation; empty if right."""
    text = "the weights differ before the step, and no known fault explains how"
    return (text,) if evidence.differs("initial-weights") else ()


def stale(evidence: Evidence) -> list[Cause]:
    """Find the first stage that received an earlier operation's tensors."""
    if not evidence.stale:
        return []
    first = min(evidence.stale, key=lambda one: (one.stage, one.operation))
    found = [one for one in evidence.stale if (one.stage, one.operation) == (first.stage, first.operation)]
    given = join_numbers(one.microbatch for one in found)
    calls = join_numbers(one.call for one in found)
    detail = f"at calls {calls}: what microbatches {given} of operation {first.operation} had"
    return [Cause("stale-tensor", rank=evidence.placement[first.stage], stage=first.stage, detail=detail)]


def old_weights(evidence: Evidence) -> list[Cause]:
    """Find stages that computed with an earlier operation's weights."""
    found = evidence.old_weights
    if found is None:
        return []
    when = f"operation {found.operation}" if found.operation else "the last checked step that was bit for bit"
    detail = f"computed with the weights that {when} began with: with these the reference gives all that was observed"
    whole = len(found.stages) == evidence.stages > 1
    ranks = {evidence.placement[stage] for stage in found.stages}
    return [
        Cause(
            "stale-tensor",
            rank=ranks.pop() if len(ranks) == 1 and not whole else None,
            stage=found.stages[0] if len(found.stages) == 1 else None,
            stages=tuple(found.stages) if 1 < len(found.stages) and not whole else (),
            detail=detail,
        )
    ]


def _start_beside(evidence: Evidence, expected: RightOperation) -> Start | None:
    """Collect wrong initial weights from the law's mismatches."""
    found, observed = mismatches_of("initial-weights", evidence), dict[Site, Tensor]()
    wrong = {(one.rank, one.stage, one.parameter) for one in found}
    for rank, row in enumerate(() if evidence.run is None else evidence.run.ranks):
        for site, value in (row[evidence.number].before or {}).items():
            observed |= {site: value} if (rank, *site) in wrong else {}
    for stage in () if evidence.members is None else evidence.members.stages:
        for rank, part in stage.part.members:
            own = {(stage.index, stage.names[k]): value for k, value in part.values.items() if k in stage.names}
            observed |= {site: value for site, value in own.items() if (rank, *site) in wrong}
    return Start(found, observed, expected.weights, evidence.earlier_weights) if observed else None


def _start_of_play(evidence: Evidence) -> Start | None:
    """Find the first operation concerned that began with wrong weights."""
    for number in evidence.concerned:
        recording, models = evidence.observed.recording(number), [one.model for one in evidence.played[number::-1]]
        expected, *earlier = (
            {k: v.detach() for k, v in one.named_parameters(remove_duplicate=False)} for one in models
        )
        limit = evidence.limit if "train" in evidence.setup.plan[:number] else 0.0
        began = {} if recording is None else recording.parameters
        wrong = {
            site: one for site, one in sorted(began.items()) if not agrees(one.cpu(), expected[site[1]].cpu(), limit)
        }
        at = [(stage, name, evidence.placement[stage]) for stage, name in wrong]
        found = [Mismatch("initial-weights", number + 1, rank=r, stage=s, parameter=name) for s, name, r in at]
        if found:
            return Start(found, wrong, expected, earlier)
    return None


def _name_weights(start: Start, site: Site) -> tuple[str, str] | None:
    """Name the cause behind the weights at ``site``, in words; None if they are too short."""
    stage, own = site
    observed, expected = start.observed[site].cpu(), start.expected[own].cpu()
    # Norms and biases begin alike in every layer: they identify none.
    drawn = {name: one.cpu() for name, one in start.expected.items() if one.numel() > 1 and one.std() > 0}
    every = [(name, 0, one) for name, one in drawn.items() if name != own]
    every += [(own, ago, one[own].cpu()) for ago, one in enumerate(start.earlier, 1) if own in one]
    point = Point(stage, -1, PARAMETER)
    known = Known((Label(point, ago, name=name), one) for name, ago, one in every)
    found = likeness(observed, expected, Label(point, name=own), known=known, limit=0.0)
    if found is None:
        return None
    if found.kind == "other" and found.label is not None:
        if found.label.ago:
            return "stale-tensor", "those of an earlier operation"
        if found.part is not None or found.label == found.at:
            return "misplaced", f"its own, {found.change}"
        return "partition", f"those of {found.label.name}"
    if found.kind in ("rounded", "not-finite"):
        return found.kind, f"its own, {found.change}"
    if found.kind != "different" or found.part is not None or (found.cosine or 0.0) > HALF:
        return "altered", f"its own, {found.change}"
    enough = own in drawn and sum(one.numel() for one in start.observed.values()) >= MANY
    return ("randomness", "drawn otherwise") if enough else None


def partition(evidence: Evidence) -> list[Cause]:
    """Find parameters in no stage or several; skip if only names may differ."""
    found = mismatches_of("parameters-once", evidence)
    if not found or evidence.strange:
        return []
    return [Cause("partition", stage=found[0].stage, parameter=found[0].parameter, detail=describe_mismatches(found))]


def nameless(evidence: Evidence) -> Sequence[str]:
    """Say that the reference lacks some parameter names; empty if it knows all."""
    text = f"parameters of the step and of the reference do not go together: {evidence.renamed_by} says which is which"
    return (text,) if evidence.strange else ()
