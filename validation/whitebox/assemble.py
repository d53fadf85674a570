"""Assemble ranks' results: stages in order, parameters under reference names."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from torch import Tensor, nn

from pipeproof.core.ledger import NOWHERE
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.observed import Claim, Observed, Passed, RankOperation
from pipeproof.core.observe.shards import with_sizes
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import error, same_bits
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.loss_scale import LossScale
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.copies import copies_apart
from pipeproof.reference.step import Site
from pipeproof.whitebox.boundary_places import Cuts
from pipeproof.whitebox.crossings import find_passages
from pipeproof.whitebox.matching import as_mates, match, with_copies
from pipeproof.whitebox.rank import ModulePart, RankMade
from pipeproof.whitebox.shared_stages import claim_unchanged, claims, join_whole
from pipeproof.whitebox.stages_in_order import Flow, PlacedStage, in_order
from pipeproof.whitebox.tensor_index import Both


@dataclass(frozen=True)
class Assembled:
    """Stages of ``model``, whose parameters have ``contents`` by name, from all ranks' parts.

    repeated: computes parameters that the model uses in several places. first: for later operations, the first one,
    which sets stages and names; name: the operation's kind.
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
        """Stages, ordered by first parameter in the reference; a later operation has the first one's names."""
        if self.first is not None:
            return tuple(
                replace(one, part=self._whole(self.made[one.rank].parts[one.chunk], one.names))
                for one in self.first.stages
            )
        parts = [(rank, chunk, part) for rank, made in enumerate(self.made) for chunk, part in enumerate(made.parts)]
        found = match([part.locals for *_, part in parts], self.contents)
        found = with_copies(found, [part.gradients for *_, part in parts], lambda: self._several)
        stages = []
        for number, (rank, chunk, part) in enumerate(parts):
            names = {k: name for (at, k), name in found.names.items() if at == number}
            unmatched = {k: why for (at, k), why in found.unmatched.items() if at == number}
            stages.append(PlacedStage(number, rank, self._whole(part, names), names, unmatched, chunk))

        def feeds(one: PlacedStage, other: PlacedStage) -> bool:
            return Flow.of(one.part.calls or ()).feeds(Flow.of(other.part.calls or ()))

        return in_order(stages, [*self._parameters], lambda: self._several, feeds)

    def _whole(self, part: ModulePart, names: Mapping[int, str]) -> ModulePart:
        """Return ``part``, with shards joined into whole parameters called ``names``.

        Starting weights that differ from a rank's own are values, even if they equal another reference parameter.
        """
        shapes = {k: tuple(self._parameters[name].shape) for k, name in names.items()}
        members = []
        for rank, one in part.members:
            content = {k: one.locals[k].content for k in names}
            others = {k: c for k, c in content.items() if c != self.contents.get(names[k]) and c in self._by_content}
            values = {k: self._by_content[c] for k, c in others.items() if c is not None} | dict(one.values)
            members.append((rank, replace(one, shards=with_sizes(one.shards, shapes), values=values)))
        gradients = list(part.gradients)
        for k in (k for k in names if k in part.shards and part.shards[k].shape is None):
            whole = join_whole([(one.shards[k], one.gradients[k]) for _, one in members if k in one.shards])
            gradients[k] = gradients[k] if whole is None else whole.view(self._parameters[names[k]].shape)
        shards = with_sizes(part.shards, shapes)
        return replace(part, gradients=tuple(gradients), shards=shards, members=tuple(members))

    @cached_property
    def owner(self) -> dict[str, int]:
        """Stage by parameter name: for an absent name, the stage of an alias, or ``NOWHERE``."""
        held = {name: stage.index for stage in reversed(self.stages) for name in stage.names.values()}
        by_tensor = {id(self._parameters[name]): stage for name, stage in held.items()}
        return {name: held.get(name, by_tensor.get(id(p), NOWHERE)) for name, p in self._parameters.items()}

    def holder(self, site: Site, expected: Tensor | None) -> int | None:
        """Return the first rank whose part at ``site`` differs from ``expected``.

        If all are right or unknown, return the first holder; None without holders.
        """
        stage, k = self._at.get(site, (None, 0))
        if stage is None:
            return None
        holders = [(rank, part) for rank, part in stage.part.members if k not in part.lacks]
        for rank, part in holders:
            gradient, shard = part.gradients[k], part.shards.get(k)
            if expected is not None and gradient is not None and shard is not None and gradient.numel():
                own = shard.of(expected)
                if own.shape == gradient.shape and error(gradient, own) > ALIKE:
                    return rank
        return holders[0][0] if holders else stage.rank

    def beginner(self, site: Site) -> int | None:
        """Return the first rank whose starting weights at ``site`` differ from the reference's.

        None for unsharded or unknown weights.
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
        """Stage and parameter number by site."""
        return {(stage.index, name): (stage, k) for stage in self.stages for k, name in stage.names.items()}

    @property
    def sites(self) -> frozenset[Site]:
        """Sites on ranks, without aliases; missing parameters are at ``NOWHERE``."""
        held = {name for _, name in self._at}
        own = frozenset((stage, name) for name, stage in self.owner.items() if name in held or stage == NOWHERE)
        return own | self.copies

    @cached_property
    def copies(self) -> frozenset[Site]:
        """Sites that repeat an earlier stage's parameter, if the model uses it more than once."""
        again = {(stage, name) for stage, name in self._at if self.owner[name] != stage}
        return frozenset(site for site in again if site[1] in self._several)

    @property
    def tied(self) -> list[Mapping[int, str]]:
        """Tied parameters with copies in several stages."""
        return copies_apart(self.model, self.owner, self.copies)

    @property
    def unmatched(self) -> dict[Site, str]:
        """Parameters unknown to the reference, by the step's names, with reasons."""
        return {
            (stage.index, stage.part.locals[k].name): why for stage in self.stages for k, why in stage.unmatched.items()
        }

    @property
    def other_build(self) -> str:
        """First rank whose reference started with different weights, in words; empty if equal."""
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
        """Stages with unknown action order."""
        return frozenset(s.index for s in self.stages if s.part.calls is None and s.index not in self.traced)

    @property
    def traced(self) -> frozenset[int]:
        """Stages in the step's own trace."""
        return frozenset(action.stage for made in self.made for action in made.actions or ())

    @property
    def missed(self) -> str:
        """Watched but unobserved stages, with a likely reason; empty if observed."""
        found = [(str(stage.index), stage.part.missed) for stage in self.stages if stage.part.missed]
        which = "watched stages {} were" if len(found) > 1 else "watched stage {} was"
        return f"{which.format(', '.join(index for index, _ in found))} not observed: {found[0][1]}" if found else ""

    @property
    def frozen(self) -> range:
        """Leading stages before any trainable parameter: they receive no gradient."""
        trained = [self.owner[name] for name, parameter in self._parameters.items() if parameter.requires_grad]
        return range(min((stage for stage in trained if stage != NOWHERE), default=0))

    @property
    def remarks(self) -> dict[str, str]:
        """Gaps in watched stages' observations, by affected law."""
        watched, count = [stage for stage in self.stages if stage.part.calls], self.replicas.count
        gaps = []
        if watched and count > 1:
            scales = f"a replica's own scale or {count} times that"
            gaps.append(f"gradients there are right at {scales}: a factor of {count} in all of them would not show")
        fed = [str(stage.index) for stage in watched if not any(call.inputs for call in stage.part.calls or ())]
        if fed:
            who = f"stage{'s' * (len(fed) > 1)} {', '.join(fed)} took no tensor as an argument"
            gaps.append(f"{who}: inputs and input gradients were not compared there")
        late = [stage.names[k] for stage in self.stages for k in sorted(stage.part.late & stage.names.keys())]
        when = f"ranks wrote {first_few(late)} when the next operation used them: hand weights back once all are there"
        return ({"boundaries": "; ".join(gaps)} if gaps else {}) | ({"updated-parameters": when} if late else {})

    @property
    def max_norm(self) -> float | None:
        """Clipping norm, as the first reporting rank states it."""
        return next((made.max_norm for made in self.made if made.max_norm is not None), None)

    @property
    def loss_scale(self) -> LossScale | None:
        """Loss scale on the last stage's rank, if reported, with each reporting rank's divisor."""
        known = {rank: made.loss_scale for rank, made in enumerate(self.made) if made.loss_scale is not None}
        losses = known.get(self.stages[-1].rank) if self.stages else None
        return None if losses is None else LossScale(losses, losses, ranks=known)

    @property
    def unlike(self) -> str:
        """Reason why updated weights cannot match the reference optimizer's; empty if they can."""
        return next((made.unlike for made in self.made if made.unlike), "")

    @property
    def begun(self) -> dict[Site, Tensor]:
        """Nonzero gradients from before the step."""
        return {site: stage.part.begun[k] for site, (stage, k) in self._at.items() if k in stage.part.begun}

    @property
    def left(self) -> dict[str, Tensor]:
        """Returned weights after the operation, by name."""
        every = [(name, stage.part.after.get(k)) for (_, name), (stage, k) in self._at.items()]
        held = {id(self._parameters[name]): one[1] for name, one in reversed(every) if one and one[0] is None}
        return {name: held[id(one)] for name, one in self._parameters.items() if id(one) in held}

    def passages(self, places: Both | None, note_handed_on: Callable[[Cuts], None]) -> list[dict[int, Passed]]:
        """Return boundary observations by stage, for each line.

        ``places`` are required if any stage was watched.
        """
        if places is None:
            return [{} for _ in self._lines]
        scaled = 1.0 if self.loss_scale is None else self.loss_scale.losses
        return find_passages(self._calls, self.replicas.microbatches, places, note_handed_on, scaled=scaled)

    def has_passed_at(self, places: Both) -> bool:
        """True if all watched boundary tensors occur in ``places``, bit for bit."""
        forward, backward = places
        calls = [call for line in self._calls for every in line.values() for call in every]
        there = [one for call in calls for one in (*call.inputs, *call.outputs)]
        flowed = [[*call.output_gradients.values(), *call.input_gradients.values()] for call in calls]
        known = forward.recognise(there), backward.recognise(list(chain.from_iterable(flowed)))
        return all(known)

    def observe(self, known: Sequence[Mapping[int, Passed]]) -> Observed:
        """Return all results; ``known``: boundary observations by line."""
        rows = tuple((self._operation(rank, made, known),) for rank, made in enumerate(self.made))
        placement = tuple(stage.rank for stage in self.stages)
        schedule = Schedule("foreign", self.replicas.microbatches, placement, tuple(() for _ in self.made))
        return Observed(schedule, rows, tuple(self._holders(line) for line in self._lines[1:]))

    @property
    def _lines(self) -> range:
        return range(1 + max((one.line for one in self.made), default=0))

    @property
    def _calls(self) -> list[dict[int, tuple[Call, ...]]]:
        """Watched calls by stage, for each line."""
        every = [
            {stage.index: stage.part.copies.get(line) if line else stage.part.calls for stage in self.stages}
            for line in self._lines
        ]
        return [{stage: calls for stage, calls in one.items() if calls is not None} for one in every]

    def _holders(self, line: int) -> dict[int, int]:
        """Return the first rank on ``line`` for each stage with known actions."""
        held = {
            stage.index: [rank for rank, _ in stage.part.members if self.made[rank].line == line]
            for stage in self.stages
            if line in stage.part.copies or (stage.part.calls is None and stage.index in self.traced)
        }
        return {stage: ranks[0] for stage, ranks in held.items() if ranks}

    @cached_property
    def _several(self) -> Collection[str]:
        """Parameters with several uses in the model; computed only for possible duplicates."""
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
        before = {}
        for site, (part, k) in own.items() if "initial-weights" not in made.unseen else ():
            content = part.locals[k].content
            if k in part.values or part.later or content is None:
                before[site] = part.values.get(k)
            else:
                before[site] = self._by_content[content]
        held = self._holders(made.line)
        ran = [stage for stage in self.stages if (held.get(stage.index) if made.line else stage.rank) == rank]
        flows = {stage.index: known[made.line][stage.index] for stage in ran if stage.index in known[made.line]}
        every, done = list(flows.values()), made.actions
        if done is None:  # in observed order, or by stage without times
            done = tuple(action for flow in every for action in flow.actions)
            times = [time for flow in every for time in flow.times]
            if len(times) == len(done):
                done = tuple(done[k] for k in sorted(range(len(done)), key=times.__getitem__))
        # A trace may include stages without parameters, which are absent here.
        actions = tuple(action for action in done if 0 <= action.stage < len(self.stages))
        forwards: dict[int, list[int]] = {}
        for stage, kind, microbatch in actions:
            if kind is Kind.FORWARD:
                forwards.setdefault(stage, []).append(microbatch)
        # In stages whose microbatches are out of order, running averages may differ legitimately.
        in_turn = [one for one in stages if (order := forwards.get(one.index)) is not None and order == sorted(order)]
        return RankOperation(
            self.name,
            made.losses,
            actions,
            called=tuple(call for flow in every for call in flow.called),
            loss=made.loss,
            gradients={site: part.gradients[k] for site, (part, k) in own.items()},
            norm=made.norm,
            parameters={s: part.after[k][1] for s, (part, k) in own.items() if k in part.after and not self.unlike},
            before={site: value for site, value in before.items() if value is not None},
            crossings=tuple(crossing for flow in every for crossing in flow.crossings),
            uncompared=sum(flow.uncompared for flow in every),
            extra={stage: flow.extra for stage, flow in flows.items() if any(flow.extra)},
            share=made.share,
            buffers=self.buffers(in_turn),
            claims=tuple(claim for stage in stages for claim in self._claims(stage)),
            line=made.line,
            outputs=made.outputs,
            unseen=made.unseen,
        )

    def buffers(self, stages: Sequence[PlacedStage]) -> dict[Site, Tensor]:
        """Return buffers in ``stages`` that the model has in this form, if they saw all microbatches."""
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
        """True if each stage ran all microbatches in one place, so its buffers saw them all."""
        one_place = bool(self.replicas.together) or all(len(stage.part.members) < 2 for stage in self.stages)
        return self.replicas.count == 1 and one_place

    def _claims(self, stage: PlacedStage) -> Iterator[Claim]:
        if self.name != "train":  # ranks may join shared parts in the update alone
            yield from claim_unchanged(stage, self.name)
            return
        for k, name in stage.names.items():
            every = claims((stage.index, name), k, stage.part.members, self.replicas)
            yield from (one for one in every if not (self.unlike and one.law == "updated-parameters"))
