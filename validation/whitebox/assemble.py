"""From what the ranks brought back to what can be judged: stages in order, parameters under the reference's names."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from torch import Tensor, nn

from pipeproof.core.ledger import NOWHERE
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.observed import Claim, Observed, Passed, RankOperation
from pipeproof.core.observe.shards import gathered, sized, untiled
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import error, same_bits
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.loss_scale import LossScale
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.copies import copies_apart
from pipeproof.reference.step import Site
from pipeproof.whitebox.boundary_places import Cuts
from pipeproof.whitebox.claims import claims, left_alone
from pipeproof.whitebox.crossings import passed
from pipeproof.whitebox.matching import as_mates, match, with_copies
from pipeproof.whitebox.rank import ModulePart, RankMade
from pipeproof.whitebox.stages_in_order import Flow, PlacedStage, in_order
from pipeproof.whitebox.survey import Both


@dataclass(frozen=True)
class Assembled:
    """All ranks' parts as stages of ``model``, whose parameters have these ``contents`` by name.

    ``repeated`` tells which of them the model uses in several places. Of a later operation, ``first`` is the first one,
    whose stages and names it has; ``name`` is its own.
    """

    model: nn.Module
    contents: Mapping[str, bytes]
    made: Sequence[RankMade]
    replicas: Replicas
    repeated: Callable[[], Collection[str]] = frozenset
    first: "Assembled | None" = None
    name: str = "train"

    @cached_property
    def stages(self) -> tuple[PlacedStage, ...]:
        """In the order in which the reference has their first parameters."""
        return self._matched if self.first is None else tuple(map(self._like, self.first.stages))

    def _like(self, stage: PlacedStage) -> PlacedStage:
        """The stage that the first operation has as ``stage``."""
        assert self.first is not None, "asked for of later operations"
        return replace(stage, part=self._whole(self.made[stage.rank].parts[stage.chunk], stage.names))

    @property
    def _matched(self) -> tuple[PlacedStage, ...]:
        parts = [(rank, chunk, part) for rank, made in enumerate(self.made) for chunk, part in enumerate(made.parts)]
        found = match([part.locals for *_, part in parts], self.contents)
        found = with_copies(found, [part.gradients for *_, part in parts], lambda: self._several)
        stages = []
        for number, (rank, chunk, part) in enumerate(parts):
            names = {k: name for (at, k), name in found.names.items() if at == number}
            unmatched = {k: why for (at, k), why in found.unmatched.items() if at == number}
            stages.append(PlacedStage(number, rank, self._whole(part, names), names, unmatched, chunk))
        return in_order(stages, [*self._parameters], lambda: self._several, _feeds)

    def _whole(self, part: ModulePart, names: Mapping[int, str]) -> ModulePart:
        """``part``, with shards put together as the whole parameters that the model has under ``names``."""
        shapes = {k: tuple(self._parameters[name].shape) for k, name in names.items()}
        members = tuple(
            (rank, replace(one, shards=sized(one.shards, shapes), values=self._values(one, names)))
            for rank, one in part.members
        )
        gradients = list(part.gradients)
        for k in (k for k in names if k in part.shards and part.shards[k].shape is None):
            lying = [(one.shards[k], one.gradients[k]) for _, one in members if k in one.shards]
            whole = None if untiled([shard for shard, _ in lying]) else gathered(lying)
            gradients[k] = gradients[k] if whole is None else whole.view(self._parameters[names[k]].shape)
        return replace(part, gradients=tuple(gradients), shards=sized(part.shards, shapes), members=members)

    def _values(self, part: ModulePart, names: Mapping[int, str]) -> Mapping[int, Tensor]:
        """The weights that a rank began with in place of its own, also where they are others of the reference's."""
        content = {k: part.locals[k].content for k in names}
        others = {k: one for k, one in content.items() if one is not None and one != self.contents.get(names[k])}
        return {k: self._by_content[one] for k, one in others.items() if one in self._by_content} | dict(part.values)

    @cached_property
    def owner(self) -> dict[str, int]:
        """The stage of every parameter name: of one that is not held, that of another name of it, or ``NOWHERE``."""
        held = {name: stage.index for stage in reversed(self.stages) for name in stage.names.values()}
        by_tensor = {id(self._parameters[name]): stage for name, stage in held.items()}
        return {name: held.get(name, by_tensor.get(id(p), NOWHERE)) for name, p in self._parameters.items()}

    def holder(self, site: Site, expected: Tensor | None) -> int | None:
        """The first rank whose part of what the step has at ``site`` is another than that of ``expected``.

        Where all are right, or it is not known, it is the first that has any; None where none has.
        """
        stage, k = self._at.get(site, (None, 0))
        if stage is None:
            return None
        holders = [(rank, part) for rank, part in stage.part.members if k not in part.lacks]
        wrong = (rank for rank, part in holders if expected is not None and _is_wrong(part, k, expected))
        return next(wrong, next((rank for rank, _ in holders), stage.rank))

    def beginner(self, site: Site) -> int | None:
        """The first rank whose part of the weights at ``site`` was not the reference's before the step.

        None where ranks do not have it in parts, or it is not known.
        """
        stage, k = self._at.get(site, (None, 0))
        began = None if stage is None else stage.part.values.get(k)
        expected = self._parameters[site[1]].detach().cpu()
        if stage is None or began is None or began.shape != expected.shape:
            return None
        lying = ((rank, part.shards[k]) for rank, part in stage.part.members if k in part.shards)
        wrong = (rank for rank, at in lying if not at.flat and not same_bits(at.of(began), at.of(expected)))
        return next(wrong, None)

    @cached_property
    def _at(self) -> dict[Site, tuple[PlacedStage, int]]:
        """The stage of every site that is held, and the parameter's number there."""
        return {(stage.index, name): (stage, k) for stage in self.stages for k, name in stage.names.items()}

    @property
    def sites(self) -> frozenset[Site]:
        """Those that are held, and for what no rank holds one at ``NOWHERE``; not other names of what is held."""
        held = {name for _, name in self._at}
        own = frozenset((stage, name) for name, stage in self.owner.items() if name in held or stage == NOWHERE)
        return own | self.copies

    @cached_property
    def copies(self) -> frozenset[Site]:
        """What is held under a name by which an earlier stage holds it, too, where the model uses it more than once."""
        again = {(stage, name) for stage, name in self._at if self.owner[name] != stage}
        return frozenset(site for site in again if site[1] in self._several)

    @property
    def tied(self) -> list[Mapping[int, str]]:
        """Tied parameters with copies in several stages."""
        return copies_apart(self.model, self.owner, self.copies)

    @property
    def unmatched(self) -> dict[Site, str]:
        """Parameters that the reference does not have, by the names that the step gives them, and why."""
        return {
            (stage.index, stage.part.locals[k].name): why for stage in self.stages for k, why in stage.unmatched.items()
        }

    @property
    def other_build(self) -> str:
        """Which rank's reference first began with other weights than this one's; empty if none did."""
        for name, content in self.contents.items():
            for rank, made in enumerate(self.made):
                if made.weights.get(name) != content:
                    return f"on rank {rank} it has other weights, first {name}"
        return ""

    @property
    def watched(self) -> bool:
        return any(stage.part.calls is not None for stage in self.stages)

    @property
    def unseen(self) -> frozenset[int]:
        """The stages whose actions are not known in their order."""
        return frozenset(s.index for s in self.stages if s.part.calls is None and s.index not in self.traced)

    @property
    def traced(self) -> frozenset[int]:
        """The stages whose actions the step tells."""
        return frozenset(action.stage for made in self.made for action in made.actions or ())

    @property
    def uncalled(self) -> frozenset[int]:
        """The stages whose modules are not watched."""
        return frozenset(stage.index for stage in self.stages if stage.part.calls is None)

    @property
    def missed(self) -> str:
        """Which stages were not seen although they are watched, and why that may be; empty if there are none."""
        found = [(str(stage.index), stage.part.missed) for stage in self.stages if stage.part.missed]
        which = "watched stages {} were" if len(found) > 1 else "watched stage {} was"
        return f"{which.format(', '.join(index for index, _ in found))} not seen: {found[0][1]}" if found else ""

    @property
    def frozen(self) -> range:
        """The first stages, up to the first with a parameter to train: no gradient flows to them."""
        trained = [self.owner[name] for name, parameter in self._parameters.items() if parameter.requires_grad]
        return range(min((stage for stage in trained if stage != NOWHERE), default=0))

    @property
    def remarks(self) -> dict[str, str]:
        """What a watched stage did not show, or leaves open, by the law that would judge it."""
        watched, count = [stage for stage in self.stages if stage.part.calls], self.replicas.count
        told = []
        if watched and count > 1:
            scales = f"a replica's own scale or {count} times that"
            told.append(f"gradients there are right at {scales}: a factor of {count} in all of them would not be seen")
        fed = [str(stage.index) for stage in watched if not any(call.inputs for call in stage.part.calls or ())]
        if fed:
            who = f"stage{'s' * (len(fed) > 1)} {', '.join(fed)} took no tensor as an argument"
            told.append(f"{who}: what came in, and the gradient of that, was not compared there")
        late = [stage.names[k] for stage in self.stages for k in sorted(stage.part.late & stage.names.keys())]
        when = f"ranks wrote {first_few(late)} when the next operation used them: hand weights back once all are there"
        return ({"boundaries": "; ".join(told)} if told else {}) | ({"updated-parameters": when} if late else {})

    @property
    def max_norm(self) -> float | None:
        """What gradients were clipped to before the update, if a rank says so: the first that does."""
        return next((made.max_norm for made in self.made if made.max_norm is not None), None)

    @property
    def loss_scale(self) -> LossScale | None:
        """How losses are scaled, if the last stage's rank says so, and what each rank divides by that says so, too."""
        known = {rank: made.loss_scale for rank, made in enumerate(self.made) if made.loss_scale is not None}
        losses = known.get(self.stages[-1].rank) if self.stages else None
        return None if losses is None else LossScale(losses, losses, ranks=known)

    @property
    def unlike(self) -> str:
        """Why weights after the step are not those that the reference's optimizer makes; empty where they are."""
        return next((made.unlike for made in self.made if made.unlike), "")

    @property
    def begun(self) -> dict[Site, Tensor]:
        """The gradients that were there before the step, and not zero."""
        return {site: stage.part.begun[k] for site, (stage, k) in self._at.items() if k in stage.part.begun}

    @property
    def left(self) -> dict[str, Tensor]:
        """The weights after the operation, by name, as far as they were handed back."""
        every = [(name, stage.part.after.get(k)) for (_, name), (stage, k) in self._at.items()]
        held = {id(self._parameters[name]): one[1] for name, one in reversed(every) if one and one[0] is None}
        return {name: held[id(one)] for name, one in self._parameters.items() if id(one) in held}

    @property
    def left_in_buffers(self) -> dict[str, Tensor]:
        """The buffers after the operation, by name, as far as they were handed back and have had all microbatches."""
        return {name: buffer for (_, name), buffer in self._buffers(self.stages).items()}

    @property
    def nameless(self) -> bool:
        """Whether gradients alone were handed back, so that no weights are known."""
        return any(stage.part.locals for stage in self.stages) and all(s.part.nameless for s in self.stages)

    def passages(self, places: Both | None, note_handed_on: Callable[[Cuts], None]) -> list[dict[int, Passed]]:
        """What is known of the boundary of every watched stage, for each line of ranks that hold them.

        ``places`` are needed where there is one.
        """
        if places is None:
            return [{} for _ in self._lines]
        calls = [self._calls(line) for line in self._lines]
        scaled = 1.0 if self.loss_scale is None else self.loss_scale.losses
        return passed(calls, self.replicas.microbatches, places, note_handed_on, scaled=scaled)

    def passed_at(self, places: Both) -> bool:
        """Whether all that passed the boundaries of watched stages is in ``places``, to the bit."""
        forward, backward = places
        calls = [call for line in self._lines for every in self._calls(line).values() for call in every]
        there = [one for call in calls for one in (*call.inputs, *call.outputs)]
        flowed = [[*call.output_gradients.values(), *call.input_gradients.values()] for call in calls]
        known = forward.recognise(there), backward.recognise(list(chain.from_iterable(flowed)))
        return all(known)

    def observed(self, known: Sequence[Mapping[int, Passed]]) -> Observed:
        """What was produced; ``known``: what passed the boundaries of stages, by line."""
        rows = tuple((self._operation(rank, made, known),) for rank, made in enumerate(self.made))
        placement = tuple(stage.rank for stage in self.stages)
        schedule = Schedule("foreign", self.replicas.microbatches, placement, tuple(() for _ in self.made))
        return Observed(schedule, rows, tuple(self._holders(line) for line in self._lines[1:]))

    @property
    def _lines(self) -> range:
        return range(1 + max((one.line for one in self.made), default=0))

    def _calls(self, line: int) -> dict[int, tuple[Call, ...]]:
        """The calls of every watched stage on the ranks of ``line``."""
        every = {stage.index: stage.part.copies.get(line) if line else stage.part.calls for stage in self.stages}
        return {stage: calls for stage, calls in every.items() if calls is not None}

    def _holders(self, line: int) -> dict[int, int]:
        """The first rank of ``line`` with each stage of which it is known what ran on it."""
        held = {
            stage.index: [rank for rank, _ in stage.part.members if self.made[rank].line == line]
            for stage in self.stages
            if line in stage.part.copies or (stage.part.calls is None and stage.index in self.traced)
        }
        return {stage: ranks[0] for stage, ranks in held.items() if ranks}

    @cached_property
    def _several(self) -> Collection[str]:
        """What the model uses in several places; asked for only where something may be held twice."""
        return self.repeated()

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters(remove_duplicate=False))

    @cached_property
    def _by_content(self) -> dict[bytes, Tensor]:
        return {content: self._parameters[name].detach().cpu() for name, content in self.contents.items()}

    def _operation(self, rank: int, made: RankMade, known: Sequence[Mapping[int, Passed]]) -> RankOperation:
        stages = [stage for stage in self.stages if stage.rank == rank]
        own = {site: (stage.part, k) for site, (stage, k) in self._at.items() if stage.rank == rank}
        began = {} if "initial-weights" in made.unseen else {site: self._began(*one) for site, one in own.items()}
        held = self._holders(made.line)
        ran = [stage for stage in self.stages if (held.get(stage.index) if made.line else stage.rank) == rank]
        flows = {stage.index: known[made.line][stage.index] for stage in ran if stage.index in known[made.line]}
        every = list(flows.values())
        # A trace may speak of stages that have no parameters, and so are none here.
        done = _as_done(every) if made.actions is None else made.actions
        actions = [action for action in done if 0 <= action.stage < len(self.stages)]
        return RankOperation(
            self.name,
            made.losses,
            tuple(actions),
            called=tuple(call for flow in every for call in flow.called),
            loss=made.loss,
            gradients={site: part.gradients[k] for site, (part, k) in own.items()},
            norm=made.norm,
            parameters={s: part.after[k][1] for s, (part, k) in own.items() if k in part.after and not self.unlike},
            before={site: value for site, value in began.items() if value is not None},
            crossings=tuple(crossing for flow in every for crossing in flow.crossings),
            uncompared=sum(flow.uncompared for flow in every),
            extra={stage: flow.extra for stage, flow in flows.items() if any(flow.extra)},
            share=made.share,
            buffers=self._buffers([stage for stage in stages if stage.index in _in_turn(actions)]),
            claims=tuple(claim for stage in stages for claim in self._claims(stage)),
            line=made.line,
            outputs=made.outputs,
            unseen=made.unseen,
        )

    def _buffers(self, stages: Sequence[PlacedStage]) -> dict[Site, Tensor]:
        """Those of ``stages`` that the model has, too. One of another shape is another."""
        known, found = dict(self.model.named_buffers(remove_duplicate=False)), dict[Site, Tensor]()
        for one in stages if self.alone else ():
            named = {one.part.locals[k].name: name for k, name in one.names.items()}
            for local, buffer in one.part.buffers:
                name = local.said or local.identical or as_mates(local.name, named)
                if name in known and known[name].shape == buffer.shape:
                    found[one.index, name] = buffer
        return found

    @property
    def alone(self) -> bool:
        """Whether every stage ran all microbatches in one place, so that its buffers have had all of them."""
        one_place = bool(self.replicas.together) or all(len(stage.part.members) < 2 for stage in self.stages)
        return self.replicas.count == 1 and one_place

    def _claims(self, stage: PlacedStage) -> Iterator[Claim]:
        if self.name != "train":  # what ranks have in common may be put together in the update alone
            yield from left_alone(stage, self.name)
            return
        for k, name in stage.names.items():
            every = claims((stage.index, name), k, stage.part.members, self.replicas)
            yield from (one for one in every if not (self.unlike and one.law == "updated-parameters"))

    def _began(self, part: ModulePart, k: int) -> Tensor | None:
        """A parameter before the operation; None where it is not known."""
        content = part.locals[k].content
        if k in part.values or part.later or content is None:
            return part.values.get(k)
        return self._by_content[content]


def _feeds(one: PlacedStage, other: PlacedStage) -> bool:
    """Whether a stage's calls were given what another's made."""
    return Flow.of(one.part.calls or ()).feeds(Flow.of(other.part.calls or ()))


def _is_wrong(part: ModulePart, k: int, expected: Tensor) -> bool:
    """Whether a rank's shard is plainly another than that of ``expected``."""
    gradient, shard = part.gradients[k], part.shards.get(k)
    if gradient is None or shard is None or not gradient.numel():
        return False
    own = shard.of(expected)
    return own.shape == gradient.shape and error(gradient, own) > ALIKE


def _as_done(flows: Sequence[Passed]) -> Sequence[Action]:
    """The actions of a rank's stages, in the order in which they were, as far as that is known."""
    every = [action for flow in flows for action in flow.actions]
    times = [time for flow in flows for time in flow.times]
    return [every[k] for k in sorted(range(len(every)), key=times.__getitem__)] if len(times) == len(every) else every


def _in_turn(done: Iterable[Action]) -> Collection[int]:
    """The stages that took the microbatches in their order: of others, averages may be others, and right."""
    order: dict[int, list[int]] = {}
    for stage, kind, microbatch in done:
        if kind is Kind.FORWARD:
            order.setdefault(stage, []).append(microbatch)
    return [stage for stage, forwards in order.items() if forwards == sorted(forwards)]
