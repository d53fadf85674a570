"""Wrong tensors with right sources at the boundaries of watched stages, along the flow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeproof.core.observe.likeness import Likeness
from pipeproof.core.observe.observed import INPUT, OF_ANOTHER_PLACE, UNKNOWN_MICROBATCH, Crossing
from pipeproof.core.observe.recording import FLOWED, FORWARD_POINTS, GIVEN, HANDED_ON, KEPT, MADE, RECEIVED, Point
from pipeproof.explain.divergence import first_wrong_points
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.members import HeldStage
from pipeproof.explain.model_beside import ModelBeside

# A tensor's sources, and its consequence: how many stages further, and where.
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
_ALSO: Mapping[str, tuple[str, ...]] = {HANDED_ON: (MADE,)}  # these must be right, too
_ONWARDS: Mapping[str, int] = {MADE: 1, HANDED_ON: -1}  # stages further that a tensor is for which a stage hands on
_DONE = (MADE, KEPT, HANDED_ON)  # a stage's own doing


@dataclass(frozen=True)
class FirstWrong:
    """A wrong tensor: its place in the flow, its observation, and whether it identifies the fault."""

    point: Point
    crossing: Crossing
    what: Likeness
    telling: bool


class Boundaries:
    """Crossings of all watched stages, by point."""

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
        """Points without a judgement, by comparison or by consequence."""
        return sorted((p for p in self._unplaced if not self._is_acquitted(p)), key=_along)

    @property
    def right(self) -> bool:
        """True if every crossing matches."""
        return not self.unjudged and all(map(self._is_right, self._at))

    def first_wrong(self) -> Iterator[FirstWrong]:
        """Wrong tensors without a wrong source, along the flow."""
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
        """Find the place where an input lost ``requires_grad``, so that a stage hands no gradient on."""
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
        """The first inexact tensor; None unless all sources match bit for bit."""
        exact = {point: all(one.exact for one in there) for point, there in self._at.items()}
        found = next(iter(first_wrong_points(exact, self._evidence.stages)), None)
        if found is None or not self.is_known_before(found) or not self._unplaced.isdisjoint(self._sources(found)):
            return None
        return next(one for one in self._at[found] if not one.exact)

    def find_computed_otherwise(self) -> tuple[int, Sequence[int]] | None:
        """The first stage with an output unknown to the reference on a right input, and the microbatches concerned.

        Their losses are wrong, and every tensor computed from this output is wrong.
        """
        passed = self._evidence.passed
        stage = next((stage for stage, flow in sorted(passed.items()) if any(flow.strange.values())), None)
        beside = self._evidence.beside
        if stage is None or beside is None or passed[stage].untold or self._puts_out_parts(stage):
            return None
        found = sorted(m for m, strange in passed[stage].strange.items() if strange and self._broke_at(stage, m))
        known = all(beside.lacks(m, one) for m in found for one in passed[stage].strange[m])
        return (stage, found) if found and known and self._begins_where_expected(stage, beside) else None

    def _begins_where_expected(self, stage: int, beside: ModelBeside) -> bool:
        """True if ``stage`` begins with earlier stages' outputs in the reference, or with the model's input."""
        every = self._evidence.passed[stage].begins.values()
        begins = {place for place in every if not place.startswith(INPUT)}
        return begins <= set(beside.ends(stage - 1)) and bool(every) if stage else not begins

    def _broke_at(self, stage: int, microbatch: int) -> bool:
        """True if every input to ``stage`` matches bit for bit, and no later stage recovers."""
        later = range(stage + 1, self._last + 1)
        healed = any(self._all_right(Point(one, microbatch, MADE)) for one in later)
        came = Point(stage, microbatch, GIVEN)
        exact = self._all_right(came) and all(one.exact for one in self._at[came])
        return exact and self._other_loss(microbatch) and not healed

    def _all_right(self, point: Point) -> bool:
        """True if every tensor there matches."""
        there = self._at.get(point, ())
        return bool(there) and point not in self._unplaced and all(one.judged and one.same for one in there)

    def in_parts(self, stage: int) -> bool:
        """True if ranks hold ``stage`` in parts."""
        return any(one.part.shards for one in self._holders(stage))

    def _puts_out_parts(self, stage: int) -> bool:
        """True if ranks hold partial parameters, and perhaps partial outputs."""
        members = self._evidence.members
        return any(
            one.part.shards and not (members and members.is_alike(one, lambda call: call.outputs))
            for one in self._holders(stage)
        )

    def _holders(self, stage: int) -> Sequence[HeldStage]:
        members = self._evidence.members
        return [] if members is None else [one for one in members.stages if one.index == stage]

    def _point(self, crossing: Crossing) -> Point:
        stage, _, microbatch = crossing.action
        return Point(stage, microbatch, self._where(stage, crossing.where))

    def _where(self, stage: int, where: str) -> str:
        # Nothing is received behind the last stage: its output gradient comes from the loss.
        return FLOWED if stage == self._last and where == RECEIVED else where

    def _is_right(self, point: Point) -> bool:
        wrong = [one for one in self._at[point] if not one.same]
        sure = any(one.judged or (one.really is not None and one.really.kind == "rounded") for one in wrong)
        return not wrong or (not sure and self._is_acquitted(point))

    def _is_faint(self, point: Point) -> bool:
        """True if wrong tensors there may stem from an earlier fault too small to observe."""
        return all(one.faint for one in self._at[point] if not one.same)

    def _is_acquitted(self, point: Point) -> bool:
        """True if the consequence matches: then the tensor concerns only the runtime."""
        further, where = _INTO[point.where]
        stage = point.stage + further
        into = Point(stage, point.microbatch, self._where(stage, where))
        made = self._at.get(into, ())
        if point.where not in FORWARD_POINTS and where == HANDED_ON and self._other_gradients(point.stage):
            return False
        return bool(made) and into not in self._unplaced and all(one.judged and one.same for one in made)

    def _exact_before(self, point: Point) -> bool:
        """True if all sources match bit for bit: half the digits may hide a fault."""
        observed = [self._at.get(source, ()) for source in self._sources(point)]
        return all(crossings and all(one.exact for one in crossings) for crossings in observed)

    def _sources(self, point: Point) -> list[Point]:
        """A tensor's sources; none before the first stage."""
        sources = [Point(point.stage + n, point.microbatch, where) for n, where in _FROM[point.where]]
        return [Point(p.stage, p.microbatch, self._where(p.stage, p.where)) for p in sources if p.stage >= 0]

    def is_first(self, found: FirstWrong) -> bool:
        """True if all watched sources match bit for bit."""
        sources = self._sources(found.point)
        watched = [source for source in sources if source.stage in self._evidence.passed]
        exact = all(one.exact for source in sources for one in self._at.get(source, ()))
        return exact and self._unplaced.isdisjoint(sources) and all(source in self._at for source in watched)

    def is_known_before(self, point: Point) -> bool:
        """True if all sources were compared."""
        return all(source in self._at for source in self._sources(point))

    def _behind_the_unknown(self, point: Point) -> bool:
        """True if an earlier call with an unsure microbatch may be a source.

        Then it may be a consequence, and is not known to be first.
        """
        passed = self._evidence.passed
        stages = [stage for stage, flow in passed.items() if point.microbatch in flow.unsure]
        return any(stage < point.stage or point.where not in FORWARD_POINTS for stage in stages)

    def _what(self, point: Point, crossing: Crossing) -> Likeness:
        """Its likeness, with the tensor's number among several."""
        observed = crossing.really
        assert observed is not None, "asked for only where it is wrong"
        known = point.microbatch != UNKNOWN_MICROBATCH
        whose = known and observed.kind == "other" and not observed.text.endswith(OF_ANOTHER_PLACE)
        text = f"{observed.text}, expected microbatch {point.microbatch}'s" if whose else observed.text
        more = 0 if known else len({one.call for one in self._at[point] if not one.same}) - 1
        text += f"; {more} more call{'s have' if more > 1 else ' has'} an unknown microbatch" if more else ""
        names = [crossing.what] if crossing.what[-1].isdigit() else []
        names += [crossing.place] if crossing.place.startswith(INPUT) and (names or point.stage) else []
        what = replace(observed, words=f"{text} ({', '.join(names)})" if names else text, which=", ".join(names))
        # A loss that is multiplied, if only by zero, gives every gradient of its output that factor.
        really = [one.really for one in self._at[point]]
        whole = all(one is not None and (one.factor is not None or one.kind == "zero") for one in really)
        return what if whole or point.where != FLOWED else replace(what, kind="different", factor=None)

    def _telling(self, point: Point, crossing: Crossing, what: Likeness) -> bool:
        """True if a tensor's likeness identifies the fault.

        It does at the place where a right source made or sent it.
        """
        sources = self._sources(point)
        others = [Point(point.stage, point.microbatch, where) for where in _ALSO.get(point.where, ())]
        if any(one in self._unplaced and not self._is_acquitted(one) for one in (*sources, *others)):
            return False
        sent = point.where in (GIVEN, RECEIVED) and not crossing.place.startswith(INPUT)
        if sent and sources and what.kind != "other":
            return all(one in self._at for one in sources) and self._is_joined(min(point.stage, sources[0].stage))
        if point.where not in _DONE and what.kind not in ("different", "shape"):
            return True
        return all(one in self._at for one in sources) and (point.where != FLOWED or self._other_loss(point.microbatch))

    def _is_joined(self, stage: int) -> bool:
        """True if the next stage begins where ``stage`` ends: not if only parts, such as blocks, are watched."""
        ends, begins = self._evidence.passed[stage].ends.values(), self._evidence.passed[stage + 1].begins.values()
        return not ends or not begins or not set(ends).isdisjoint(begins)

    def _other_gradients(self, stage: int) -> bool:
        """True if ``stage`` has a wrong parameter gradient."""
        return any(m.stage == stage for m in self._evidence.verdict.mismatches if m.law in ("gradient", "presence"))

    def _other_loss(self, microbatch: int) -> bool:
        """True if the microbatch's loss differs."""
        losses = [m for m in self._evidence.verdict.mismatches if m.law == "loss"]
        return any(m.microbatch in (None, microbatch) for m in losses)

    def refine(self, found: FirstWrong) -> tuple[str, str] | None:
        """Name the fault, if the place says more than a wrong tensor."""
        point, what = found.point, found.what
        if (what.kind, point.where) in (("missing", GIVEN), ("zero", FLOWED)):
            return "dropped", what.text
        made = what.label.point if what.label is not None else None
        moved = made is not None and made.where == MADE and self._receiver_of(made) != self._rank(point.stage)
        own = made is not None and point.where == GIVEN and made.microbatch == point.microbatch
        if made is not None and own and (moved or self._always(made.stage, point.stage)):
            return "partition", f"what stage {made.stage} hands on: stages run in another order"
        if found.crossing.place.startswith(INPUT) and point.stage and point.where == GIVEN:
            return "swapped-data" if what.kind == "other" else "altered", what.text
        if made is not None and self._is_meant_here(made, point):
            return "mispaired", what.text
        if point.where == FLOWED and what.kind not in ("other", "zero") and self._other_loss(point.microbatch):
            return "computation", f"{what.text}: the loss or its target, for the output is right"
        return None

    def _always(self, made: int, stage: int) -> bool:
        """True if ``stage`` always received the output from ``made``, not from its neighbour."""
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

    def _receiver_of(self, made: Point) -> int | None:
        """The rank meant to receive a tensor: the observing stage's, or the next one's."""
        return self._rank(made.stage + _ONWARDS.get(made.where, 0))

    def _is_meant_here(self, made: Point, point: Point) -> bool:
        """True if a tensor received at ``point`` was meant for this rank, for another microbatch or stage."""
        forward = made.where in FORWARD_POINTS
        came = point.where == (GIVEN if forward else RECEIVED)
        own = (made.stage + _ONWARDS.get(made.where, 0), made.microbatch) == point[:2]
        return came and not own and self._receiver_of(made) == self._rank(point.stage)


def _along(point: Point) -> tuple[bool, int, int]:
    forward = point.where in FORWARD_POINTS
    return not forward, point.stage if forward else -point.stage, point.microbatch
