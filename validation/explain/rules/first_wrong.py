"""What is wrong at the boundaries of watched stages although all that it was made from is right, along the flow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeproof.core.observe.likeness import Likeness
from pipeproof.core.observe.observed import INPUT, OF_ANOTHER_PLACE, UNKNOWN_MICROBATCH, Crossing
from pipeproof.core.observe.recording import FLOWED, FORWARD_POINTS, GIVEN, HANDED_ON, KEPT, MADE, RECEIVED, Point
from pipeproof.explain.divergence import first_wrong_points
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.members import HeldStage
from pipeproof.explain.model_beside import ModelBeside

# What a tensor is made from, and what is made from it: how many stages further, and where.
_FROM: Mapping[str, tuple[tuple[int, str], ...]] = {
    GIVEN: ((-1, MADE),),
    MADE: ((0, GIVEN),),
    KEPT: ((0, GIVEN),),
    FLOWED: ((0, MADE),),
    RECEIVED: ((1, HANDED_ON),),
    HANDED_ON: ((0, RECEIVED), (0, GIVEN)),
}
_INTO: Mapping[str, tuple[int, str]] = {
    GIVEN: (0, MADE),
    MADE: (1, GIVEN),
    KEPT: (0, HANDED_ON),
    RECEIVED: (0, HANDED_ON),
    FLOWED: (0, HANDED_ON),
    HANDED_ON: (-1, RECEIVED),
}
_ALSO: Mapping[str, tuple[str, ...]] = {HANDED_ON: (MADE,)}  # of these too it must be known that they are right
_ONWARDS: Mapping[str, int] = {MADE: 1, HANDED_ON: -1}  # stages further that a tensor is for which a stage hands on
_DONE = (MADE, KEPT, HANDED_ON)  # a stage's own doing


@dataclass(frozen=True)
class FirstWrong:
    """A wrong tensor: where in the flow, what was seen there, and whether this says what happened to it."""

    point: Point
    crossing: Crossing
    what: Likeness
    telling: bool


class Boundaries:
    """The crossings of all watched stages, by their points."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence, self._last = evidence, evidence.stages - 1
        self._at: dict[Point, list[Crossing]] = {}
        for crossing in evidence.observed.crossings(evidence.number):
            self._at.setdefault(self._point(crossing), []).append(crossing)
        self._unplaced = {
            Point(stage, microbatch, self._where(stage, where))
            for stage, flow in evidence.passed.items()
            for where, microbatch in flow.unplaced
        }

    @property
    def unjudged(self) -> Sequence[Point]:
        """Where a tensor passed of which nobody knows whether it is right, nor does what was made from it say so."""
        return sorted((p for p in self._unplaced if not self._acquitted(p)), key=_along)

    @property
    def right(self) -> bool:
        """Whether all that passed is known to be right."""
        return not self.unjudged and all(map(self._is_right, self._at))

    def first_wrong(self) -> Iterator[FirstWrong]:
        """The wrong tensors that were made from none, along the flow."""
        found = {point: self._is_right(point) for point in self._at}
        before: set[int] = set()  # microbatches
        for point in first_wrong_points(found, self._evidence.stages):
            blurred = (point.microbatch in before or self._is_faint(point)) and not self._exact_before(point)
            before.add(point.microbatch)
            if not blurred and not self._behind_the_unknown(point):
                crossing = next(one for one in self._at[point] if not one.same)
                what = self._what(point, crossing)
                found_here = FirstWrong(point, crossing, what, self._telling(point, crossing, what))
                yield self._where_cut(found_here) or found_here

    def _where_cut(self, found: FirstWrong) -> FirstWrong | None:
        """Where an input came without ``requires_grad``, of which a stage then hands no gradient on; None: nowhere."""
        microbatch, last = found.point.microbatch, found.point.stage
        for stage, flow in sorted(self._evidence.passed.items()):
            point, cut = Point(stage, microbatch, GIVEN), flow.detached.get(microbatch, frozenset[int]())
            names = {f"input {number}" if number else "input" for number in cut}
            crossing = next((one for one in self._at.get(point, ()) if one.what in names), None)
            if (
                found.what.kind == "missing"
                and found.point.where in (HANDED_ON, RECEIVED)
                and stage <= last
                and crossing
            ):
                words = f"without requires_grad, with which stage {stage - 1} made it"
                words += f" ({crossing.what})" if crossing.what[-1].isdigit() else ""
                return FirstWrong(point, crossing, replace(found.what, words=words), True)
        return None

    def first_inexact(self) -> Crossing | None:
        """The first tensor that is not the reference's bit for bit; None unless all that it was made from is."""
        exact = {point: all(one.exact for one in there) for point, there in self._at.items()}
        found = next(iter(first_wrong_points(exact, self._evidence.stages)), None)
        if found is None or not self.is_known_before(found) or not self._unplaced.isdisjoint(self._sources(found)):
            return None
        return next(one for one in self._at[found] if not one.exact)

    def computed_otherwise(self) -> tuple[int, Sequence[int]] | None:
        """The first stage whose output is nothing that the reference computes though its input is right, and for which
        microbatches. Their losses are wrong, and nothing that they were made from this output is right."""
        passed = self._evidence.passed
        stage = next((stage for stage, flow in sorted(passed.items()) if any(flow.strange.values())), None)
        beside = self._evidence.beside
        if stage is None or beside is None or passed[stage].untold or self._puts_out_parts(stage):
            return None
        found = sorted(m for m, strange in passed[stage].strange.items() if strange and self._broke_at(stage, m))
        known = all(beside.lacks(m, one) for m in found for one in passed[stage].strange[m])
        return (stage, found) if found and known and self._begins_where_due(stage, beside) else None

    def _begins_where_due(self, stage: int, beside: ModelBeside) -> bool:
        """Whether what comes into ``stage`` is what earlier stages make in the reference, or the model's own input."""
        every = self._evidence.passed[stage].begins.values()
        begins = {place for place in every if not place.startswith(INPUT)}
        return begins <= set(beside.ends(stage - 1)) and bool(every) if stage else not begins

    def _broke_at(self, stage: int, microbatch: int) -> bool:
        """Whether all that came into ``stage`` is right bit for bit, and no later stage made what is right of it."""
        later = range(stage + 1, self._last + 1)
        healed = any(self._all_right(Point(one, microbatch, MADE)) for one in later)
        came = Point(stage, microbatch, GIVEN)
        exact = self._all_right(came) and all(one.exact for one in self._at[came])
        return exact and self._other_loss(microbatch) and not healed

    def _all_right(self, point: Point) -> bool:
        """Whether it is known that every tensor there is right."""
        there = self._at.get(point, ())
        return bool(there) and point not in self._unplaced and all(one.judged and one.same for one in there)

    def in_parts(self, stage: int) -> bool:
        """Whether ranks have parts of the parameters of ``stage``."""
        return any(one.part.shards for one in self._held(stage))

    def _puts_out_parts(self, stage: int) -> bool:
        """Whether they have, and perhaps parts of what it puts out, too."""
        members = self._evidence.members
        return any(
            one.part.shards and not (members and members.alike(one, lambda call: call.outputs))
            for one in self._held(stage)
        )

    def _held(self, stage: int) -> Sequence[HeldStage]:
        members = self._evidence.members
        return [] if members is None else [one for one in members.stages if one.index == stage]

    def _point(self, crossing: Crossing) -> Point:
        stage, _, microbatch = crossing.action
        return Point(stage, microbatch, self._where(stage, crossing.where))

    def _where(self, stage: int, where: str) -> str:
        # Nothing is received behind the last stage: what flows into it there is the loss's own gradient.
        return FLOWED if stage == self._last and where == RECEIVED else where

    def _is_right(self, point: Point) -> bool:
        wrong = [one for one in self._at[point] if not one.same]
        sure = any(one.judged or (one.really is not None and one.really.kind == "rounded") for one in wrong)
        return not wrong or (not sure and self._acquitted(point))

    def _is_faint(self, point: Point) -> bool:
        """Whether what is wrong there may come of a fault before it that is too small to be seen."""
        return all(one.faint for one in self._at[point] if not one.same)

    def _acquitted(self, point: Point) -> bool:
        """Whether what was made from it is known to be right: then it is the runtime's own affair."""
        further, where = _INTO[point.where]
        stage = point.stage + further
        into = Point(stage, point.microbatch, self._where(stage, where))
        made = self._at.get(into, ())
        if point.where not in FORWARD_POINTS and where == HANDED_ON and self._other_gradients(point.stage):
            return False
        return bool(made) and into not in self._unplaced and all(one.judged and one.same for one in made)

    def _exact_before(self, point: Point) -> bool:
        """Whether all that it was made from is right bit for bit: what is right to half its digits may hide a fault."""
        seen = [self._at.get(source, ()) for source in self._sources(point)]
        return all(crossings and all(one.exact for one in crossings) for crossings in seen)

    def _sources(self, point: Point) -> list[Point]:
        """What a tensor is made from: nothing before the first stage."""
        sources = [Point(point.stage + n, point.microbatch, where) for n, where in _FROM[point.where]]
        return [Point(p.stage, p.microbatch, self._where(p.stage, p.where)) for p in sources if p.stage >= 0]

    def is_first(self, found: FirstWrong) -> bool:
        """Whether all that a wrong tensor was made from is right bit for bit, but for what nobody watched."""
        sources = self._sources(found.point)
        watched = [source for source in sources if source.stage in self._evidence.passed]
        exact = all(one.exact for source in sources for one in self._at.get(source, ()))
        return exact and self._unplaced.isdisjoint(sources) and all(source in self._at for source in watched)

    def is_known_before(self, point: Point) -> bool:
        """Whether all that a tensor was made from was compared."""
        return all(source in self._at for source in self._sources(point))

    def _behind_the_unknown(self, point: Point) -> bool:
        """Whether this may be made from what a stage did in a call of which nobody knows that it was this microbatch's.

        Then it may be a consequence, and is not known to be first.
        """
        passed = self._evidence.passed
        stages = [stage for stage, flow in passed.items() if point.microbatch in flow.unsure]
        return any(stage < point.stage or point.where not in FORWARD_POINTS for stage in stages)

    def _what(self, point: Point, crossing: Crossing) -> Likeness:
        """What it is there instead, with the tensor's number where there are several."""
        seen = crossing.really
        assert seen is not None, "asked for only where it is wrong"
        known = point.microbatch != UNKNOWN_MICROBATCH
        whose = known and seen.kind == "other" and not seen.text.endswith(OF_ANOTHER_PLACE)
        text = f"{seen.text}, expected microbatch {point.microbatch}'s" if whose else seen.text
        more = 0 if known else len({one.call for one in self._at[point] if not one.same}) - 1
        text += f"; {more} more call{'s have' if more > 1 else ' has'} an unknown microbatch" if more else ""
        names = [crossing.what] if crossing.what[-1].isdigit() else []
        names += [crossing.place] if crossing.place.startswith(INPUT) and (names or point.stage) else []
        what = replace(seen, words=f"{text} ({', '.join(names)})" if names else text, which=", ".join(names))
        # A loss that is multiplied, if only by zero, gives every gradient of its output that factor.
        really = [one.really for one in self._at[point]]
        whole = all(one is not None and (one.factor is not None or one.kind == "zero") for one in really)
        return what if whole or point.where != FLOWED else replace(what, kind="different", factor=None)

    def _telling(self, point: Point, crossing: Crossing, what: Likeness) -> bool:
        """Whether what a tensor is instead says what happened to it.

        It does where it was made, or sent, by what is known to be right.
        """
        sources = self._sources(point)
        others = [Point(point.stage, point.microbatch, where) for where in _ALSO.get(point.where, ())]
        if any(one in self._unplaced and not self._acquitted(one) for one in (*sources, *others)):
            return False
        sent = point.where in (GIVEN, RECEIVED) and not crossing.place.startswith(INPUT)
        if sent and sources and what.kind != "other":
            return all(one in self._at for one in sources) and self._joined(min(point.stage, sources[0].stage))
        if point.where not in _DONE and what.kind not in ("different", "shape"):
            return True
        return all(one in self._at for one in sources) and (point.where != FLOWED or self._other_loss(point.microbatch))

    def _joined(self, stage: int) -> bool:
        """Whether the next stage begins where ``stage`` ends: not where parts of them are watched, as blocks may be."""
        ends, begins = self._evidence.passed[stage].ends.values(), self._evidence.passed[stage + 1].begins.values()
        return not ends or not begins or not set(ends).isdisjoint(begins)

    def _other_gradients(self, stage: int) -> bool:
        """Whether a gradient of a parameter of ``stage`` is wrong."""
        return any(m.stage == stage for m in self._evidence.verdict.mismatches if m.law in ("gradient", "presence"))

    def _other_loss(self, microbatch: int) -> bool:
        """Whether the loss of this microbatch is wrong."""
        losses = [m for m in self._evidence.verdict.mismatches if m.law == "loss"]
        return any(m.microbatch in (None, microbatch) for m in losses)

    def refined(self, found: FirstWrong) -> tuple[str, str] | None:
        """The kind of fault and its words, where the place says more than that a tensor is wrong."""
        point, what = found.point, found.what
        if (what.kind, point.where) in (("missing", GIVEN), ("zero", FLOWED)):
            return "dropped", what.text
        made = what.label.point if what.label is not None else None
        moved = made is not None and made.where == MADE and self._meant_for(made) != self._rank(point.stage)
        own = made is not None and point.where == GIVEN and made.microbatch == point.microbatch
        if made is not None and own and (moved or self._always(made.stage, point.stage)):
            return "partition", f"what stage {made.stage} hands on: stages run in another order"
        if found.crossing.place.startswith(INPUT) and point.stage and point.where == GIVEN:
            return "swapped-data" if what.kind == "other" else "altered", what.text
        if made is not None and self._meant_here(made, point):
            return "mispaired", what.text
        if point.where == FLOWED and what.kind not in ("other", "zero") and self._other_loss(point.microbatch):
            return "computation", f"{what.text}: the loss or its target, for the output is right"
        return None

    def _always(self, made: int, stage: int) -> bool:
        """Whether what came into ``stage`` of every microbatch is what ``made``, not the one before, put out of it."""
        came = {
            point.microbatch: one.really.label.point
            for point, there in self._at.items()
            for one in there
            if (point.stage, point.where) == (stage, GIVEN) and one.really is not None and one.really.label is not None
        }
        every = {m: (made, m) for m in range(self._evidence.microbatches)}
        return made + 1 != stage and {m: (put.stage, put.microbatch) for m, put in came.items()} == every

    def _rank(self, stage: int) -> int | None:
        placement = self._evidence.placement
        return placement[stage] if 0 <= stage <= self._last else None

    def _meant_for(self, made: Point) -> int | None:
        """The rank that is to have a tensor: that of the stage where it was seen, or to which it is handed on."""
        return self._rank(made.stage + _ONWARDS.get(made.where, 0))

    def _meant_here(self, made: Point, point: Point) -> bool:
        """Whether a tensor that came in at ``point`` was for this rank, but for another microbatch or stage of it."""
        forward = made.where in FORWARD_POINTS
        came = point.where == (GIVEN if forward else RECEIVED)
        own = (made.stage + _ONWARDS.get(made.where, 0), made.microbatch) == point[:2]
        return came and not own and self._meant_for(made) == self._rank(point.stage)


def _along(point: Point) -> tuple[bool, int, int]:
    forward = point.where in FORWARD_POINTS
    return not forward, point.stage if forward else -point.stage, point.microbatch
