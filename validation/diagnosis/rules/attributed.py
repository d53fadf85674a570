"""The link that final gradients alone show: what they are made of.

Where no combination explains them: is there one thing that, had it gone wrong, would have given them? A loss says which
what-ifs are worth a look, each microbatch's by itself; that all gradients follow decides.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.tolerance import error
from pipeproof.core.verdict import Size
from pipeproof.diagnosis.attribution import attribute_coarsely
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.rules.inside import first_of_backward, inside, other_forward
from pipeproof.diagnosis.rules.passages import unexplained_passage
from pipeproof.diagnosis.rules.repeated import or_wrong_message
from pipeproof.diagnosis.rules.replayed import replayed
from pipeproof.diagnosis.rules.several_times import told_apart
from pipeproof.diagnosis.rules.update import clip_factor, near
from pipeproof.diagnosis.what_if import Line, Made, WhatIf, same_loss
from pipeproof.diagnosis.what_ifs import of_backward, of_forward, spoiled
from pipeproof.observers.recording import Site
from pipeproof.pipeline.action import Kind
from pipeproof.reference.step import objective


def handed_late(evidence: Evidence) -> Sequence[str]:
    """That gradients were cleared, or clipped, before they were handed back, where the update is right."""
    laws = {law.name: law for law in evidence.verdict.laws}
    updated = laws.get("updated-parameters")
    if updated is None or updated.outcome == "fail" or not updated.checked:
        return ()
    if updated.outcome == "pass" and evidence.differs("presence") and laws["gradient"].checked == 0:
        told = "no gradient was handed back, and {}: leave gradients as the update had them"
    elif _are_clipped(evidence):
        told = "gradients are those of after the clipping, and {}: give the check those of before it"
    else:
        return ()
    return (told.format("the weights after the step are right"),)


def _are_clipped(evidence: Evidence) -> bool:
    """Whether all wrong gradients are what clipping makes of the right ones."""
    found = [one for one in evidence.verdict.mismatches if one.law == "gradient"]
    factor = clip_factor(evidence, evidence.expected.norm) if found else 1.0
    sizes = [one.found for one in found if isinstance(one.found, Size) and one.found.factor is not None]
    return factor != 1.0 and len(sizes) == len(found) and all(near(one.factor, factor) for one in sizes)


def attributed(evidence: Evidence) -> list[Cause]:
    """The causes that attribution names; where it finds none, the what-if that gives such gradients."""
    found = evidence.attribution
    if handed_late(evidence) or found is None or found.right or (evidence.sums is not None and evidence.sums.alike):
        return []
    causes = [told_apart(cause, evidence) for cause in found.causes]
    if found.unknown or not causes:  # one thing that gives everything says more than what gives a part
        own = evidence.playable is not None
        whole = played_through(evidence) if own else replayed(evidence) or inside(evidence)
        causes = whole or (_coarsely(evidence) if causes and not own else []) or causes
        causes = causes or ([] if own else other_forward(evidence) or _coarsely(evidence))
    if evidence.sums is not None:
        return [_clipped(evidence, cause) for cause in causes]
    return causes if evidence.playable is not None else [_seen_more(cause, evidence) for cause in causes]


def _coarsely(evidence: Evidence) -> list[Cause]:
    """The causes that attribution names where it takes rounding to be as coarse as that of what is computed."""
    found = None if evidence.due is None else attribute_coarsely(evidence.due.update)
    return [] if found is None else [told_apart(cause, evidence) for cause in found.causes]


def of_gradients(evidence: Evidence) -> list[Cause]:
    """The causes that attribution names for a step that is not ours, as whatever else was seen of it tells them."""
    found = evidence.attribution
    return [] if found is None else [_seen_more(told_apart(cause, evidence), evidence) for cause in found.causes]


def _backwards_each(evidence: Evidence, stages: Iterable[int]) -> float | None:
    """How often every microbatch went backwards through watched stages; None where that is not one number."""
    times = set()
    for flow in map(evidence.passed.get, stages):
        ran = Counter(action.microbatch for action in (flow.actions if flow else ()) if action.kind is Kind.BACKWARD)
        times |= {ran[m] for m in range(evidence.microbatches)}
    return float(max(times)) if len(times) == 1 and max(times) > 1 else None


def _seen_more(cause: Cause, evidence: Evidence) -> Cause:
    """``cause`` with what losses and watched calls say of it; those of an operation before say nothing."""
    if cause.earlier:
        return cause
    if cause.kind == "missing" and evidence.differs("loss") and evidence.differs("gradient"):
        told = f"{cause.detail}; what follows from them, losses too, is wrong: they took no part in the forward"
        return replace(cause, kind="computation", detail=told)
    where = range(evidence.stages) if cause.stage is None else [cause.stage]
    if cause.kind == "scale" and cause.factor is not None and _backwards_each(evidence, where) == cause.factor:
        return replace(cause, kind="doubled", detail=f"every backward ran {cause.factor:g} times")
    if cause.kind in ("scale", "sign") and evidence.flowed_right(where, cause.factor):
        after = "every output gradient that came in is right: it was multiplied after that"
        return replace(cause, detail="; ".join(filter(None, (cause.detail, after))))
    watched = {*evidence.passed} - evidence.unseen
    if cause.kind == "swapped-activations" and evidence.differs("loss") and cause.stage in watched:
        return or_wrong_message(replace(cause, kind="mispaired"))
    return cause


def unexplained(evidence: Evidence) -> Sequence[str]:
    """What is left without an explanation, at the boundaries and in gradients."""
    if told := handed_late(evidence):
        return told
    found = evidence.unexplained
    found = (*first_of_backward(evidence), *found) if found else found
    if found and evidence.passed:
        return (*unexplained_passage(evidence), *found)
    wrong = [law for law in ("presence", "gradient") if evidence.sums is not None and evidence.differs(law)]
    return found or tuple(f"{law}: what is wrong with it tells nothing" for law in wrong[:1])


def in_part(evidence: Evidence, causes: Sequence[Cause]) -> tuple[tuple[()], Sequence[str]]:
    """What attribution leaves unexplained, where ``causes`` are those that it names: they give a part alone."""
    found = evidence.attribution
    own = set() if found is None else {(one.stage, one.microbatches, one.parameter) for one in found.causes}
    told = any((one.stage, one.microbatches, one.parameter) in own for one in causes)
    left = found.unknown if found is not None and told else ()
    return (), left


def _clipped(evidence: Evidence, cause: Cause) -> Cause:
    """``cause`` with a word on clipping, where all gradients are a part of what they should be: it does just that."""
    factor, size, most = cause.factor, evidence.expected.norm, evidence.max_norm
    if cause.kind != "scale" or cause.stage is not None or cause.rank is not None:
        return cause
    if factor is None or not 0 < factor < 1 or not size:
        return cause
    text = ""
    if most is not None and near(factor, most / (size + 1e-6)):
        text = f"clipping to {most:g} does that: they were compared after it"
    elif evidence.verdict.law("grad-norm").outcome == "pass":
        text = f"the norm is right, so it was done later, as clipping to {factor * size:.6g} does: compare before that"
    return replace(cause, detail="; ".join(filter(None, (cause.detail, text))))


_NOTHING = WhatIf("", 0, "")


def played_through(evidence: Evidence) -> list[Cause]:
    """The one thing that explains every loss and every gradient, if there is one among those that are known."""
    if evidence.setup.plan[evidence.number] != "train":
        return []
    at = _WhatIfs(evidence)
    wrong = sorted({m.microbatch for m in evidence.verdict.mismatches if m.law == "loss" and m.microbatch is not None})
    return at.forward(wrong) if wrong else at.backward()


class _WhatIfs:
    """What-ifs about the failing operation, held against what was observed."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        setup, number = evidence.setup, evidence.number
        self._batches = setup.batches(number)
        self._played = {one.number: one for one in evidence.played}
        model = self._played[number].model
        self._layers = setup.layers
        self._line = Line(model.train(), self._layers, *objective(model, self._batches, setup.recipe))
        self._seen = evidence.observed.gradients(number)
        self._right: dict[int, Made] = {}
        self._right_there: dict[tuple[int, int], Made | None] = {}
        self._sites = list(evidence.expected.gradients)

    def forward(self, wrong: Sequence[int]) -> list[Cause]:
        """What-ifs that give the losses of the microbatches ``wrong``, and then all gradients.

        A loss that the last stage computed right was reported wrongly: no what-if is needed.
        """
        right, seen = self._evidence.expected.losses, self._evidence.observed.losses(self._number)
        if all(same_loss(seen[m], right[m]) for m in wrong):
            return []
        for stage in reversed(range(self._evidence.stages)):
            for one in of_forward(self._played, self._evidence.number, stage, self._layers):
                if all(self._gives_loss(one, m) for m in wrong) and self._gives_gradients(one, wrong):
                    every = len(wrong) == len(self._batches)
                    return [self._cause(one, () if every else tuple(wrong))]
        return []

    def backward(self) -> list[Cause]:
        """The losses are right: what-ifs about the backward of the last stage with a wrong gradient."""
        wrong = self._wrong()
        if not wrong:
            return []
        stage = max(s for s, _ in wrong)
        every = range(len(self._batches))
        played = self._played[self._number]
        outputs = {k: f"its output {k}" for k in range(len(played.boundaries[0].outputs[stage]))}
        for one in of_backward(stage, outputs, played.dtype):
            alone = [self._alone(one, m) for m in every]
            for concerned in (every, *((m,) for m in every if len(every) > 1)):
                if self._gives_stage(one.stage, {m: alone[m] for m in concerned}) and self._gives_gradients(
                    one, concerned
                ):
                    return [self._cause(one, () if len(concerned) == len(every) else tuple(concerned))]
        return [self._cause(spoiled(stage), ())] if self._reads_what_was_kept(stage, wrong) else []

    def _wrong(self) -> set[Site]:
        found = self._evidence.verdict.mismatches
        return {(m.stage, m.parameter) for m in found if m.law == "gradient" and m.stage is not None and m.parameter}

    def _reads_what_was_kept(self, stage: int, wrong: set[Site]) -> bool:
        """Whether exactly those gradients of ``stage`` are wrong that its backward reads its kept input for.

        What is handed on is read for it as well, so that the stages before must be wrong; without any, it is not told
        from a fault of these parameters alone.
        """
        if not stage or any((s, name) not in wrong for s, name in self._trained() if s < stage):
            return False
        spoilt, right = self._line.gradients(spoiled(stage), 0, self._batches[0]), self._right_of(0)
        if spoilt is None:
            return False
        reads = {
            (s, name) for s, name in self._trained() if s == stage and not _alike(spoilt[name], right[name], limit=1e-6)
        }
        own = {(s, name) for s, name in self._trained() if s == stage}
        return bool(reads) and reads != own and reads == {site for site in wrong if site[0] == stage}

    def _trained(self) -> Iterator[Site]:
        expected = self._evidence.expected.gradients
        return (site for site, gradient in expected.items() if gradient is not None and bool(gradient.any()))

    def _gives_loss(self, one: WhatIf, m: int) -> bool:
        inputs = self._played[self._evidence.number].boundaries[m].inputs[one.stage]
        loss, seen = self._line.loss(one, m, inputs, self._batches[m]), self._evidence.observed.losses(self._number)[m]
        return loss is not None and same_loss(loss, seen)

    def _gives_gradients(self, one: WhatIf, microbatches: Sequence[int]) -> bool:
        made = {m: self._line.gradients(one, m, self._batches[m]) for m in microbatches}
        return self._are_those_seen(self._sites, made, {m: self._right_of(m) for m in microbatches})

    def _gives_stage(self, stage: int, made: Mapping[int, Made | None]) -> bool:
        """Whether the gradients of ``stage`` are what was seen if these microbatches had made these there."""
        held = [site for site in self._sites if site[0] == stage and site not in self._evidence.shared]
        return self._are_those_seen(held, made, {m: self._right_alone(stage, m) for m in made})

    def _are_those_seen(
        self, sites: Iterable[Site], made: Mapping[int, Made | None], right: Mapping[int, Made | None]
    ) -> bool:
        """Whether the gradients of ``sites`` are what was seen if microbatches had made ``made``, not ``right``."""
        changes = [(new, old) for m, new in made.items() if new is not None and (old := right[m]) is not None]
        return len(changes) == len(made) and all(self._follows(site, changes) for site in sites)

    def _follows(self, site: Site, changes: Sequence[tuple[Made, Made]]) -> bool:
        whole = self._evidence.expected.gradients[site]
        for made, right in changes:
            new, old = made[site[1]], right[site[1]]
            if whole is not None and new is not None and old is not None:
                whole = whole.double() + (new.double() - old.double())
        return _alike(self._seen.get(site), whole, self._evidence.limit)

    def _alone(self, one: WhatIf, m: int) -> Made | None:
        """What microbatch m makes in the stage of ``one`` alone."""
        reached = self._played[self._number].boundaries[m]
        received = reached.output_gradients[one.stage]
        return self._line.alone(one, reached.inputs[one.stage], received, self._batches[m])

    def _right_alone(self, stage: int, m: int) -> Made | None:
        if (stage, m) not in self._right_there:
            self._right_there[stage, m] = self._alone(replace(_NOTHING, stage=stage), m)
        return self._right_there[stage, m]

    def _right_of(self, m: int) -> Made:
        if m not in self._right:
            found = self._line.gradients(_NOTHING, m, self._batches[m])
            assert found is not None, "the reference fits itself"
            self._right[m] = found
        return self._right[m]

    @property
    def _number(self) -> int:
        return self._evidence.number

    def _cause(self, one: WhatIf, microbatches: tuple[int, ...]) -> Cause:
        rank = self._evidence.placement[one.stage]
        return Cause(one.kind, rank=rank, stage=one.stage, microbatches=microbatches, detail=f"as if {one.text}")


def _alike(one: Tensor | None, other: Tensor | None, limit: float) -> bool:
    if one is None or other is None:
        return one is other
    return error(one.double(), other.double()) <= max(limit, 1e-5)
