"""Evidence for explaining a recorded step: observed and expected results."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from pipeproof.core.nudged import Nudges, OtherProducts, doubt_rounding
from pipeproof.core.observe.shards import Shard
from pipeproof.core.old_weights import WithWeights, hold_to_old_weights
from pipeproof.core.replicas import Replicas
from pipeproof.core.verdict import Verdict
from pipeproof.explain.atoms import Update
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.explain import explain_safely
from pipeproof.explain.explain import explain_verdict as explained_evidence
from pipeproof.explain.members import Members
from pipeproof.records.rank_part import Kept, Kind, Notes
from pipeproof.records.record import RankStage, Record, RecordedOperation
from pipeproof.reference.accumulation import add_onto
from pipeproof.reference.data import Batch
from pipeproof.reference.pairing import Sums
from pipeproof.reference.step import Contribution, Expected, Gradient, Site
from pipeproof.whitebox.matching import Local
from pipeproof.whitebox.rank import ModulePart
from pipeproof.whitebox.stages_in_order import PlacedStage
from pipeproof.worlds.side_store import Exchange, RanksAbsent

_UNKNOWN = Batch((), torch.empty(0), 0)  # a record keeps no microbatches
_UNPAIRED = "a record has only sums over all microbatches: SingleDevice, beside the job, tells them apart"


@dataclass(frozen=True)
class RecordedStep:
    """A step compared with ``record``, operation ``number``, with the places of its parameters.

    ``observed``: its compared gradients; ``begun``: their initial content, or the previous step's gradients; ``norms``:
    each rank's, None if not reported. ``left_out``: the number of wrong gradients missing from ``observed``.
    ``copies``: each rank's gradient of shared parameters. ``max_norm``: the record's clipping norm, if known.
    ``model``: attribution's view of the step beside a live reference, if any. ``shards``: places of ranks' parts;
    ``replicas``: the work of each rank, if known. ``had``: by name, ranks and stages with initial ``.grad`` content;
    None unless all are known. ``near``: passing gradients that are not the expected ones. ``earlier``: initial weights
    of an earlier step; ``with_weights``: the reference's results with those.
    """

    record: RecordedOperation
    observed: Mapping[str, Gradient]
    begun: Mapping[str, Gradient]
    norms: Sequence[float | None]
    places: Mapping[str, Sequence[RankStage]]
    number: int = 0
    left_out: int = 0
    copies: Mapping[str, Mapping[int, Gradient]] = field(default_factory=dict)
    max_norm: float | None = None
    model: "Callable[[RecordedStep], Update] | None" = None
    shards: Mapping[str, Mapping[int, Shard]] = field(default_factory=dict)
    replicas: Replicas | None = None
    had: Mapping[str, Collection[RankStage]] | None = None
    near: Collection[str] = frozenset()
    earlier: Sequence[Mapping[str, Tensor]] = ()
    with_weights: WithWeights | None = None

    @classmethod
    def of_notes(
        cls,
        record: Record,
        number: int,
        places: Mapping[str, Sequence[RankStage]],
        notes: Sequence[Notes],
        *,
        fetch: Callable[[str], Tensor],
        **known: Any,
    ) -> Self:
        """Build a checked step for operation ``number`` of ``record`` from each rank's ``notes``.

        ``fetch`` gets published tensors; ``known``: further fields.
        """
        expected, begun = record.operations[number], dict(record.before(number))
        shown: dict[Kind, dict[str, dict[int, Gradient]]] = {"right": {}, "near": {}, "wrong": {}}
        for rank, one in enumerate(notes):
            for name, (kind, address) in one.ends.items():
                right = expected.gradients[name] if kind == "right" else None
                if kind != "left out":
                    shown[kind].setdefault(name, {})[rank] = right if address is None else fetch(address)
        for name in {name for one in notes for name, address in one.begun.items() if address is not None}:
            holders = [rank for rank, _ in places.get(name, ())] or range(len(notes))
            old = [notes[rank].begun.get(name) for rank in holders]
            begun[name] = add_onto([None if address is None else fetch(address) for address in old])
        right_ones, near, wrong = shown.values()
        copies, had = dict[str, dict[int, Gradient]](), dict[str, list[RankStage]]()
        for name, at in places.items():
            there = near.get(name, {}) | wrong.get(name, {})
            usual = next(iter(right_ones.get(name, {}).values()), None)
            if len(at) > 1:
                copies[name] = {rank: there.get(rank, usual) for rank, _ in at}
            had[name] = [(rank, stage) for rank, stage in at if name in notes[rank].begun]
        blamed = {n: sorted(at, key=lambda one: one[0] not in wrong.get(n, {})) for n, at in places.items()}
        return cls(
            expected,
            {name: next(iter(by_rank.values())) for by_name in shown.values() for name, by_rank in by_name.items()},
            begun,
            places=dict(sorted(blamed.items(), key=lambda item: item[0] in wrong)),  # so that wrong ranks are named
            number=number,
            left_out=sum(kind == "left out" for one in notes for kind, _ in one.ends.values()),
            copies=copies,
            max_norm=record.max_norm,
            had=None if any(None in one.begun.values() for one in notes) else had,
            near=near.keys() - wrong.keys(),
            **known,
        )

    def evidence(self, verdict: Verdict) -> Evidence:
        """Evidence for ``verdict`` on this step."""
        microbatches, alike = len(self.record.microbatches), len(set(self.record.microbatches)) == 1
        return Evidence(
            verdict,
            self.placement,
            microbatches,
            self._ranks,
            gradients=self.gradients,
            norms=self.norms,
            number=self.number,
            operation=self.record.operation,
            right=self,
            earlier_weights=self.earlier,
            with_weights=self.with_weights,
            members=self._members,
            left_out=self.left_out,
            alike=alike and self.model is None and microbatches > 1,
            clipped_to=self.max_norm,
            strange=any(m.what == "held" and m.expected == 0 for m in verdict.mismatches),
            renamed_by="rename=",
        )

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Rank of every stage; a stage without parameters shares the previous one's."""
        ranks = {stage: rank for found in self.places.values() for rank, stage in found[:1]}
        found: list[int] = []
        for stage in range(1 + max(ranks, default=0)):
            found.append(ranks.get(stage, found[-1] if found else 0))
        return tuple(found)

    @property
    def _ranks(self) -> int:
        """Number of ranks: a record has one norm for any number."""
        return max(len(self.norms), 1 + max((rank for found in self.places.values() for rank, _ in found), default=0))

    @property
    def _members(self) -> Members:
        """Ranks of every stage with their parts."""
        count, ranks = len(self.record.microbatches), self._ranks
        replicas = self.replicas or Replicas((0,) * ranks, count)
        if replicas.count > 1 and not replicas.shares:
            replicas = replace(replicas, shares=((),) * ranks)  # each replica's microbatches are unknown
        stages, count = [self._stage(stage) for stage in range(len(self.placement))], len(self.placement)

        def contributions() -> list[Contribution]:
            """The model's contribution of each microbatch; nothing without a model."""
            found = list[Contribution]()
            for microbatch, loss in enumerate(self.record.losses) if self.model is not None else ():
                own = [(stage, self.update.now.contribution(stage, microbatch).gradients) for stage in range(count)]
                given = {(stage, name): one for stage, gradients in own for name, one in gradients.items()}
                found.append(Contribution(loss, given))
            return found

        return Members(stages, replicas, contributions, self.norms)

    def _stage(self, stage: int) -> PlacedStage:
        """A stage with its ranks, whose parts lie in their joint gradients."""
        names = [name for name in self.observed if any(at == stage for _, at in self.places.get(name, ()))]
        ranks = sorted({rank for name in names for rank, at in self.places[name] if at == stage})
        whole = ModulePart(tuple(map(Local, names)), tuple(self.observed[name] for name in names))
        members = tuple((rank, self._part(whole, rank, stage)) for rank in ranks)
        rank = ranks[0] if ranks else self.placement[stage]
        return PlacedStage(stage, rank, replace(whole, members=members), dict(enumerate(names)), {})

    def _part(self, whole: ModulePart, rank: int, stage: int) -> ModulePart:
        """Cut the part of ``rank`` from the ``whole`` of a stage."""
        names = [one.name for one in whole.locals]
        lying = {k: self.shards.get(name, {}).get(rank) for k, name in enumerate(names)}
        shards = {k: shard for k, shard in lying.items() if shard is not None}
        gradients, had = list[Gradient](), self.had or {}
        for k, name in enumerate(names):
            own = self.observed[name] if k in shards else self.copies.get(name, {}).get(rank, self.observed[name])
            gradients.append(own if own is None or k not in shards else shards[k].of(own))
        lacks = frozenset(k for k, name in enumerate(names) if (rank, stage) not in self.places[name])
        begun = {k: self.begun.get(name) for k, name in enumerate(names) if (rank, stage) in had.get(name, ())}
        there = {k: old for k, old in begun.items() if old is not None}
        return replace(whole, gradients=tuple(gradients), shards=shards, lacks=lacks, begun=there)

    def site(self, name: str) -> Site:
        """Return a parameter's site: in the only stage, if unknown."""
        found = self.places.get(name)
        return (found[0][1] if found else 0), name

    @cached_property
    def gradients(self) -> Mapping[Site, Gradient]:
        """Observed gradients by site."""
        return {self.site(name): gradient for name, gradient in self.observed.items()}

    @cached_property
    def expected(self) -> Expected:
        """Expected results, limited to compared ones."""
        expected = self.record
        gradients = {self.site(name): expected.gradients[name] for name in self.observed}
        return Expected(
            expected.operation, expected.losses, expected.loss or 0.0, gradients=gradients, norm=expected.norm
        )

    @cached_property
    def update(self) -> Update:
        """The step for attribution."""
        return self.of_record if self.model is None else self.model(self)

    @property
    def of_record(self) -> Update:
        """The step for attribution, from the record alone."""
        expected, begun = self.expected.gradients, {self.site(name): one for name, one in self.begun.items()}
        before = {site: self.record.before[site[1]] for site in expected if site[1] in self.record.before}
        now = Sums([expected], before, [_UNKNOWN] * len(self.record.microbatches), unpaired=_UNPAIRED)
        passing = frozenset(map(self.site, self.near))
        return Update(self.gradients, expected, now, old=begun, placement=self.placement, passing=passing)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.record.before


def explain_step(
    verdict: Verdict,
    kept: Kept,
    exchange: Exchange,
    *,
    look: Callable[[], RecordedStep],
    moved: Nudges,
    products: OtherProducts | None,
    bound_s: float,
) -> Verdict:
    """Add rank 0's causes to ``verdict``, equal on every rank; ``look`` collects the step.

    Rank 0 asks ``moved`` and ``products``, as in ``doubt_rounding``, before it explains anything. Every rank calls
    this, and waits for rank 0 at most ``bound_s`` seconds.
    """
    try:
        for address, tensor in kept.tensors.items():
            exchange.give(address, tensor)
        mine = None
        if exchange.rank == 0:
            judged = doubt_rounding(verdict, moved, lambda _: products)
            mine = hold_to_old_weights(judged, lambda: look().evidence(judged).old_weights)
        verdict = exchange.gather(mine, what="how far rounding goes", bound_s=bound_s)[0]
        mine = (
            explain_safely(verdict, lambda: explained_evidence(look().evidence(verdict)))
            if exchange.rank == 0
            else None
        )
        found: Verdict = exchange.finish(mine, what="the cause of what is wrong", bound_s=bound_s)[0]
    except RanksAbsent as absent:
        return replace(verdict, undecided=(f"the cause was not found in time: {absent}",))
    finally:
        exchange.clear(kept.tensors)
    return found
