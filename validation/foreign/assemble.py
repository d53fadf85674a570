"""From what the ranks brought back to what can be judged: stages in order, parameters under the reference's names."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from torch import Tensor, nn

from pipeproof.core.ledger import NOWHERE
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import error, same_bits
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.loss_scale import LossScale
from pipeproof.foreign.boundary_places import Cuts
from pipeproof.foreign.buffers import in_turn, named_buffers
from pipeproof.foreign.crossings import passed
from pipeproof.foreign.flow import Flow
from pipeproof.foreign.kept import kept
from pipeproof.foreign.matching import match, with_copies
from pipeproof.foreign.rank import ModulePart, RankMade
from pipeproof.foreign.shared_stages import claims
from pipeproof.foreign.stages_in_order import PlacedStage, in_order
from pipeproof.foreign.survey import Both
from pipeproof.observers.calls import Call
from pipeproof.observers.observed import Claim, Observed, Passed, RankOperation
from pipeproof.observers.shards import Shard, gathered, sized, untiled
from pipeproof.pipeline.action import Action
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.copies import copies_apart
from pipeproof.reference.step import Site


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

    def holder(self, site: Site, due: Tensor | None) -> int | None:
        """The first rank whose part of what the step has at ``site`` is not that of ``due``; None where none has any.

        Where all are, or nobody knows, it is the first that has any.
        """
        for stage in self.stages:
            for k, name in stage.names.items():
                if (stage.index, name) == site:
                    holders = [(rank, part) for rank, part in stage.part.members if k not in part.lacks]
                    wrong = (rank for rank, part in holders if due is not None and _is_wrong(part, k, due))
                    return next(wrong, next((rank for rank, _ in holders), stage.rank))
        return None

    def beginner(self, site: Site) -> int | None:
        """The first rank whose part of the weights at ``site`` was not the reference's before the step.

        None where ranks do not have it in parts, or nobody knows.
        """
        for stage in self.stages:
            for k, name in stage.names.items():
                if (stage.index, name) == site:
                    seen, due = stage.part.values.get(k), self._parameters[name].detach().cpu()
                    lying = {rank: part.shards[k] for rank, part in stage.part.members if k in part.shards}
                    wrong = (rank for rank, at in lying.items() if not at.flat and _differs(seen, due, at))
                    return next(wrong, None)
        return None

    @property
    def due(self) -> frozenset[Site]:
        """The sites that are held, and for what nobody holds one at ``NOWHERE``; not other names of what is held."""
        held = {name for stage in self.stages for name in stage.names.values()}
        own = frozenset((stage, name) for name, stage in self.owner.items() if name in held or stage == NOWHERE)
        return own | self.copies

    @cached_property
    def copies(self) -> frozenset[Site]:
        """What is held under a name by which an earlier stage holds it, too, where the model uses it more than once."""
        held = {(stage.index, name) for stage in self.stages for name in stage.names.values()}
        again = {site for site in held if self.owner[site[1]] != site[0]}
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
        """The stages of which nobody knows what they did in which order."""
        return frozenset(s.index for s in self.stages if s.part.calls is None and s.index not in self.traced)

    @property
    def traced(self) -> frozenset[int]:
        """The stages whose actions the step tells."""
        return frozenset(action.stage for made in self.made for action in made.actions or ())

    @property
    def uncalled(self) -> frozenset[int]:
        """The stages whose modules nobody watched."""
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
        """Why weights after the step are not those that the reference's optimizer makes; empty where nobody says so."""
        return next((made.unlike for made in self.made if made.unlike), "")

    @property
    def begun(self) -> dict[Site, Tensor]:
        """The gradients that were there before the step, and not zero."""
        return {
            (s.index, name): s.part.begun[k] for s in self.stages for k, name in s.names.items() if k in s.part.begun
        }

    @property
    def left(self) -> dict[str, Tensor]:
        """The weights after the operation, by name, as far as they were handed back."""
        every = [(name, stage.part.after.get(k)) for stage in self.stages for k, name in stage.names.items()]
        held = {id(self._parameters[name]): one[1] for name, one in reversed(every) if one and one[0] is None}
        return {name: held[id(one)] for name, one in self._parameters.items() if id(one) in held}

    @property
    def left_in_buffers(self) -> dict[str, Tensor]:
        """The buffers after the operation, by name, as far as they were handed back and have seen all microbatches."""
        return {name: buffer for (_, name), buffer in self._buffers(self.stages).items()}

    @property
    def nameless(self) -> bool:
        """Whether gradients alone were handed back, so that nobody knows of any weights."""
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
        own = [stage for stage in self.stages if stage.rank == rank]
        held = self._holders(made.line)
        ran = [stage for stage in self.stages if (held.get(stage.index) if made.line else stage.rank) == rank]
        flows = {stage.index: known[made.line][stage.index] for stage in ran if stage.index in known[made.line]}
        seen = list(flows.values())
        actions = _as_done(seen) if made.actions is None else made.actions
        return RankOperation(
            self.name,
            made.losses,
            tuple(self._known(actions)),
            called=tuple(call for flow in seen for call in flow.called),
            loss=made.loss,
            gradients={(s.index, name): s.part.gradients[k] for s in own for k, name in s.names.items()},
            norm=made.norm,
            parameters={site: weight for stage in own for site, weight in self._after(stage)},
            before={site: value for stage in own for site, value in self._before(stage)},
            crossings=tuple(crossing for flow in seen for crossing in flow.crossings),
            uncompared=sum(flow.uncompared for flow in seen),
            extra={stage: flow.extra for stage, flow in flows.items() if any(flow.extra)},
            share=made.share,
            buffers=self._buffers([s for s in own if s.index in in_turn(self._known(actions))]),
            claims=tuple(claim for stage in own for claim in self._claims(stage)),
            line=made.line,
            outputs=made.outputs,
            unseen=made.unseen,
        )

    def _known(self, actions: Sequence[Action]) -> Iterator[Action]:
        """A trace may speak of stages that have no parameters, and so are none here."""
        return (action for action in actions if 0 <= action.stage < len(self.stages))

    def _buffers(self, stages: Sequence[PlacedStage]) -> dict[Site, Tensor]:
        return dict(named_buffers(stages, self.model)) if self.alone else {}

    @property
    def alone(self) -> bool:
        """Whether every stage ran all microbatches in one place, so that its buffers have seen all of them."""
        one_place = bool(self.replicas.together) or all(len(stage.part.members) < 2 for stage in self.stages)
        return self.replicas.count == 1 and one_place

    def _claims(self, stage: PlacedStage) -> Iterator[Claim]:
        if self.name != "train":  # what ranks have in common may be put together in the update alone
            yield from kept(stage, self.name)
            return
        for k, name in stage.names.items():
            every = claims((stage.index, name), k, stage.part.members, self.replicas)
            yield from (one for one in every if not (self.unlike and one.law == "updated-parameters"))

    def _after(self, stage: PlacedStage) -> Iterator[tuple[Site, Tensor]]:
        for k, name in stage.names.items():
            if k in stage.part.after and not self.unlike:
                yield (stage.index, name), stage.part.after[k][1]

    def _before(self, stage: PlacedStage) -> Iterator[tuple[Site, Tensor]]:
        for k, name in stage.names.items() if "initial-weights" not in self.made[stage.rank].unseen else ():
            content, value = stage.part.locals[k].content, stage.part.values.get(k)
            if value is not None:
                yield (stage.index, name), value
            elif content is not None and not stage.part.later:
                yield (stage.index, name), self._by_content[content]


def _feeds(one: PlacedStage, other: PlacedStage) -> bool:
    """Whether a stage's calls were given what another's made."""
    return Flow.of(one.part.calls or ()).feeds(Flow.of(other.part.calls or ()))


def _differs(seen: Tensor | None, due: Tensor, at: Shard) -> bool:
    return seen is not None and seen.shape == due.shape and not same_bits(at.of(seen), at.of(due))


def _is_wrong(part: ModulePart, k: int, due: Tensor) -> bool:
    """Whether a rank's shard is plainly another than that of ``due``."""
    seen, shard = part.gradients[k], part.shards.get(k)
    if seen is None or shard is None or not seen.numel():
        return False
    own = shard.of(due)
    return own.shape == seen.shape and error(seen, own) > ALIKE


def _as_done(flows: Sequence[Passed]) -> Sequence[Action]:
    """The actions of a rank's stages, in the order in which they were, as far as that is known."""
    every = [action for flow in flows for action in flow.actions]
    times = [time for flow in flows for time in flow.times]
    return [every[k] for k in sorted(range(len(every)), key=times.__getitem__)] if len(times) == len(every) else every
