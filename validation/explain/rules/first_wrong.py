"""Wrong tensors with right sources at the boundaries of watched stages, along the flow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeproof.core.observe.likeness import Likeness
from pipeproof.core.observe.observed import INPUT, OF_ANOTHER_PLACE, UNKNOWN_MICROBATCH, Crossing
from pipeproof.core.observe.recording import FLOWED, FORWARD_POINTS, GIVEN, HANDED_ON, KEPT, MADE, RECEIVED, Point
from pipeproof.explain.divergence import first_wrong_points, flow_of
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.members import HeldStage

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
            stage, _, microbatch = crossing.action
            self._at.setdefault(self._point(stage, microbatch, crossing.where), []).append(crossing)
        passed = evidence.passed.items()
        self._unplaced = {self._point(stage, m, where) for stage, flow in passed for where, m in flow.unplaced}

    @property
    def unjudged(self) -> Sequence[Point]:
        """Points without a judgement, by comparison or by consequence."""
        return sorted((point for point in self._unplaced if not self._is_acquitted(point)), key=flow_of)

    @property
    def right(self) -> bool:
        """True if every crossing matches."""
        return not self.unjudged and all(map(self._is_right, self._at))

    def first_wrong(self) -> Iterator[FirstWrong]:
        """Wrong tensors without a wrong source, along the flow.

        A wrong tensor may be the consequence of an earlier fault too small to observe, unless all its sources match bit
        for bit; or of an earlier call with an unsure microbatch.
        """
        found = {point: self._is_right(point) for point in self._at}
        passed = self._evidence.passed
        before: set[int] = set()  # microbatches
        for point in first_wrong_points(found, self._evidence.stages):
            wrong = [one for one in self._at[point] if not one.same]
            sources = [self._at.get(source, ()) for source in self._sources(point)]
            exact = all(crossings and all(one.exact for one in crossings) for crossings in sources)
            blurred = not exact and (point.microbatch in before or all(one.faint for one in wrong))
            before.add(point.microbatch)
            unsure = [stage for stage, flow in passed.items() if point.microbatch in flow.unsure]
            backward = point.where not in FORWARD_POINTS
            if not blurred and not any(backward or stage < point.stage for stage in unsure):
                what = self._what(point, wrong[0])
                found_here = FirstWrong(point, wrong[0], what, self._telling(point, wrong[0], what))
                yield self._where_cut(found_here) or found_here

    def _where_cut(self, found: FirstWrong) -> FirstWrong | None:
        """Find the place where an input lost ``requires_grad``, so that a stage hands no gradient on."""
        if found.what.kind != "missing" or found.point.where not in (HANDED_ON, RECEIVED):
            return None
        for stage, flow in sorted(self._evidence.passed.items()):
            point = Point(stage, found.point.microbatch, GIVEN)
            names = {f"input {k}" if k else "input" for k in flow.detached.get(point.microbatch, frozenset[int]())}
            crossing = next((one for one in self._at.get(point, ()) if one.what in names), None)
            if stage <= found.point.stage and crossing:
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

        Their inputs match bit for bit, their losses are wrong, and so is every tensor computed from this output; the
        stage begins with earlier stages' outputs in the reference, or with the model's input.
        """
        passed, beside, members = self._evidence.passed, self._evidence.beside, self._evidence.members
        stage = next((stage for stage, flow in sorted(passed.items()) if any(flow.strange.values())), None)
        if stage is None or beside is None or passed[stage].untold:
            return None
        for one in self._holders(stage):  # partial parameters may give partial outputs
            if one.part.shards and not (members and members.is_alike(one, lambda call: call.outputs)):
                return None
        found = []
        for m, strange in sorted(passed[stage].strange.items()):
            came, later = Point(stage, m, GIVEN), range(stage + 1, self._last + 1)
            exact = self._all_right(came) and all(one.exact for one in self._at[came])
            if strange and exact and self._other_loss(m) and not any(self._all_right(Point(s, m, MADE)) for s in later):
                found.append(m)
        if not found or not all(beside.lacks(m, one) for m in found for one in passed[stage].strange[m]):
            return None
        begins = {place for place in passed[stage].begins.values() if not place.startswith(INPUT)}
        plain = begins <= set(beside.ends(stage - 1)) and bool(passed[stage].begins) if stage else not begins
        return (stage, found) if plain else None

    def _all_right(self, point: Point) -> bool:
        """True if every tensor there matches."""
        there = self._at.get(point, ())
        return bool(there) and point not in self._unplaced and all(one.judged and one.same for one in there)

    def in_parts(self, stage: int) -> bool:
        """True if ranks hold ``stage`` in parts."""
        return any(one.part.shards for one in self._holders(stage))

    def _holders(self, stage: int) -> Sequence[HeldStage]:
        members = self._evidence.members
        return [] if members is None else [one for one in members.stages if one.index == stage]

    def _point(self, stage: int, microbatch: int, where: str) -> Point:
        # Nothing is received behind the last stage: its output gradient comes from the loss.
        return Point(stage, microbatch, FLOWED if stage == self._last and where == RECEIVED else where)

    def _is_right(self, point: Point) -> bool:
        wrong = [one for one in self._at[point] if not one.same]
        sure = any(one.judged or (one.really is not None and one.really.kind == "rounded") for one in wrong)
        return not wrong or (not sure and self._is_acquitted(point))

    def _is_acquitted(self, point: Point) -> bool:
        """True if the consequence matches: then the tensor concerns only the runtime."""
        further, where = _INTO[point.where]
        mismatches = self._evidence.verdict.mismatches
        if point.where not in FORWARD_POINTS and where == HANDED_ON:
            if any(m.stage == point.stage and m.law in ("gradient", "presence") for m in mismatches):
                return False
        return self._all_right(self._point(point.stage + further, point.microbatch, where))

    def _sources(self, point: Point) -> list[Point]:
        """A tensor's sources; none before the first stage."""
        sources = [(point.stage + n, where) for n, where in _FROM[point.where]]
        return [self._point(stage, point.microbatch, where) for stage, where in sources if stage >= 0]

    def is_first(self, found: FirstWrong) -> bool:
        """True if all watched sources match bit for bit."""
        sources = self._sources(found.point)
        watched = [source for source in sources if source.stage in self._evidence.passed]
        exact = all(one.exact for source in sources for one in self._at.get(source, ()))
        return exact and self._unplaced.isdisjoint(sources) and all(source in self._at for source in watched)

    def is_known_before(self, point: Point) -> bool:
        """True if all sources were compared."""
        return all(source in self._at for source in self._sources(point))

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

        It does at the place where a right source made or sent it. The next stage begins where one ends, unless only
        parts, such as blocks, are watched.
        """
        sources = self._sources(point)
        others = [Point(point.stage, point.microbatch, where) for where in _ALSO.get(point.where, ())]
        if any(one in self._unplaced and not self._is_acquitted(one) for one in (*sources, *others)):
            return False
        known = self.is_known_before(point)
        sent = point.where in (GIVEN, RECEIVED) and not crossing.place.startswith(INPUT)
        if sent and sources and what.kind != "other":
            passed, stage = self._evidence.passed, min(point.stage, sources[0].stage)
            if not known:
                return False
            ends, begins = passed[stage].ends.values(), passed[stage + 1].begins.values()
            return not ends or not begins or not set(ends).isdisjoint(begins)
        if point.where not in _DONE and what.kind not in ("different", "shape"):
            return True
        return known and (point.where != FLOWED or self._other_loss(point.microbatch))

    def _other_loss(self, microbatch: int) -> bool:
        """True if the microbatch's loss differs."""
        losses = [m for m in self._evidence.verdict.mismatches if m.law == "loss"]
        return any(m.microbatch in (None, microbatch) for m in losses)

    def refine(self, found: FirstWrong) -> tuple[str, str] | None:
        """Name the fault, if the place says more than a wrong tensor."""
        point, what = found.point, found.what
        if (what.kind, point.where) in (("missing", GIVEN), ("zero", FLOWED)):
            return "dropped", what.text
        if what.label is not None:
            made = what.label.point
            placement, meant = self._evidence.placement, made.stage + _ONWARDS.get(made.where, 0)
            here = 0 <= meant <= self._last and placement[meant] == placement[point.stage]
            if point.where == GIVEN and made.microbatch == point.microbatch:
                if (made.where == MADE and not here) or self._always(made.stage, point.stage):
                    return "partition", f"what stage {made.stage} hands on: stages run in another order"
        if found.crossing.place.startswith(INPUT) and point.stage and point.where == GIVEN:
            return "swapped-data" if what.kind == "other" else "altered", what.text
        if what.label is not None and here and (meant, made.microbatch) != point[:2]:
            if point.where == (GIVEN if made.where in FORWARD_POINTS else RECEIVED):
                return "mispaired", what.text  # it was meant for this rank, for another microbatch or stage
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
