"""Check one step of a running job link by link; each rank needs only its own stages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.limits import coarsest, precision_among, precision_of
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.digest import contents, digest
from pipeproof.core.observe.shards import Shard, local_tensor
from pipeproof.core.observe.watching import Watcher
from pipeproof.core.verdict import Verdict
from pipeproof.explain.explain import explain_safely
from pipeproof.explain.loss_scale import LossScale
from pipeproof.records.as_given import gradients_of, losses_of, number
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.rank_part import AdapterNames, Arrival, describe_problems, run_of
from pipeproof.records.record import RecordError
from pipeproof.records.step_parts import how_ranks_ended, not_compared
from pipeproof.records.step_record import Pairs
from pipeproof.reference.again import keep_undisturbed
from pipeproof.reference.snapshot import Snapshot, keep_unchanged
from pipeproof.reference.step import Site
from pipeproof.whitebox.handed_back import Gradient
from pipeproof.whitebox.task import LossOfAll
from pipeproof.wings.composed.causes import OwnEvidence, explain
from pipeproof.wings.composed.chain import Chain, together
from pipeproof.wings.composed.collect import Begun, EarlyStep, WatchedStages
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.gradients import OwnGradients
from pipeproof.wings.composed.link import Link, StageCalls
from pipeproof.wings.composed.loss import Division
from pipeproof.wings.composed.reruns import RerunNote, Reruns
from pipeproof.wings.composed.rounding import length_in_pieces
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.wings.composed.start import Agreed, ChainStart
from pipeproof.wings.composed.sums import ReplicaSums, StageShares
from pipeproof.wings.composed.update import WeightsAfter
from pipeproof.wings.composed.weights import RENAMED, enter_equal, explain_hand_cut, not_one, weights_here
from pipeproof.wings.composed.whole import LAWS, OwnPart, Reported, Whole, judge, norm_of, not_known
from pipeproof.wings.composed.wiring import ExtraCalls, refusals
from pipeproof.worlds.rank_report import RankReport
from pipeproof.worlds.settings import drawing_apart
from pipeproof.worlds.side_store import Exchange, RanksAbsent

_SILENT = (
    "stage {} has parameters to train, and ran without gradients, as under no_grad: call requires_grad_(False) on "
    "them, if that is meant"
)
_LOST = (
    "stages were run again, and what this changed in the job cannot be put back: {}; keep it where neither they nor "
    "the loss lead to, or check against a SingleDevice"
)
_OTHER_DATA = (
    "ranks that have a stage together are given other inputs in their first stage, or the same in another order: give "
    "each the same at the same time"
)
_OF_THE_LOSS = "the loss trains weights that no stage holds: let the last stage's module hold them"


class ComposedCheck(CheckedStep):
    """A step held against itself: every rank runs its own stages again, and neighbours compare what passed."""

    def __init__(
        self,
        modules: nn.Module | Mapping[int, nn.Module],
        microbatches: Pairs | None,
        *,
        against: AgainstItself,
        turn: int = 0,
        **options: Any,
    ) -> None:
        """Take ``check_step``'s arguments."""
        super().__init__(modules, microbatches, laws=LAWS, **options)
        self._by, self._turn, self._scale = against, turn, 1.0  # what losses were scaled by as the step began
        self._agreed, self._reported = Agreed(), Reported()
        self._watched = WatchedStages(against)
        self._begun, self._early = Begun(against.keep), EarlyStep()
        self._weights: dict[int, dict[str, bytes]] = {}  # of rerun stages, at the step's start
        self._shards = OwnShards(self._own)
        self._shares = StageShares(Exchange(None))
        self._after = WeightsAfter(self._own, self._ledger)
        self._part_of_chain: OwnPart | None = None
        self._found = OwnEvidence()

    @property
    def microbatches(self) -> int:
        """Number of microbatches in the step."""
        return len(self._agreed.data)

    def take(self, watcher: Watcher) -> None:
        """Take the calls of all stages from ``watcher`` after the step; weights have their initial values."""
        self._watched = WatchedStages(self._by, watcher)

    def begin(self, gradients: Mapping[str, Gradient]) -> None:
        with self.noting():
            self._begun.take(gradients)

    def report(
        self,
        *,
        losses: Sequence[float] | None = None,
        loss: float | None = None,
        norm: float | None = None,
    ) -> None:
        with self.noting():
            self._reported.losses += [] if losses is None else [tuple(losses_of(losses))]
            self._reported.loss += [] if loss is None else [number("loss", loss)]
            self._reported.norm += [] if norm is None else [number("norm", norm)]

    def gradients(self, named: Mapping[str, Gradient] | None = None) -> None:
        self._close()
        if self._obstacle or self._absent is not None or self._part_of_chain is not None:
            return
        known: Mapping[str, Gradient] | None = {}  # useless here, but others wait for this rank
        with self.noting():
            known = None if named is None else gradients_of(named, self._own.places)
        modules, by = self._own.modules, self._by
        every = {k: modules[k].named_parameters(remove_duplicate=False) for k in self._weights}
        state = keep_unchanged(
            *(modules, by.loss_fn, by.generators, (self._given, self._watched.arguments)),
            lean=[by.optimizers, by.masters, by.scaler],
            host=by.host,
            digest=lambda one: digest(local_tensor(one)),
            begun={id(one): self._weights[k][name] for k, named in every.items() for name, one in named},
            lost=lambda what: self.refuse(_LOST.format(what)),
        )
        with self.noting(), state as snapshot, drawing_apart(), keep_undisturbed(modules.values()):
            try:
                self._part_of_chain = self._make(known, snapshot)
            except RanksAbsent as absent:
                self._absent = absent

    def _begin(self) -> str:
        start, whole = ChainStart(None), None
        with self.noting():
            self._take_given()
            self._by.check()
            self._shards = OwnShards(self._own)
            if obstacle := self._shards.obstacle:
                raise RecordError(obstacle)
            start = ChainStart.of(self._given, self._own, self._by, together=self._shards.together)
            whole = self._by.whole()
        arrivals: list[Arrival] = self._arrivals()
        run, problems = run_of(arrivals)
        if problems:
            return describe_problems(problems)
        starts = self._gather(start.with_data(self._given), "the microbatches of the checked step")
        agreed = Agreed.of(run, self._exchange.rank, arrivals, starts, bound_s=self._bound_s)
        if problems := agreed.problems:
            return describe_problems(problems)
        self._agreed = agreed = replace(
            agreed, only=None if self._by.stages == "all" else self._turn % (agreed.last + 1)
        )
        if whole is not None:
            names: dict[int, str] = {}
            every = whole.named_parameters(remove_duplicate=False)
            first = {name: names.setdefault(id(one), name) for name, one in every}
            self._agreed = agreed = replace(agreed, first=first, known=True)
        self._shards = OwnShards(self._own, [arrival.shards for arrival in arrivals])
        if isinstance(loss_fn := self._by.loss_fn, LossOfAll):  # of the targets of all replicas
            targets = None if self._given is None else [(None, target) for _, target in self._given]
            pairs = agreed.all_pairs(self._gather(targets, "the targets of all microbatches"))
            with self.noting():
                self._by = replace(self._by, loss_fn=loss_fn.of(pairs))
        self.begin(self._own.gradients)
        self._early.open(one for module in self._own.modules.values() for one in module.parameters())
        self._scale = self._by.scale
        self._after = WeightsAfter(self._own, self._ledger, self._by.masters)
        for stage, module in self._own.modules.items():
            compared = agreed.only in (None, stage)
            self._watched.watch(stage, module, kept=compared or stage == agreed.last)
            if compared:
                self._weights[stage] = contents(module)
        return ""

    def _make(self, named: Mapping[str, Gradient] | None, snapshot: Snapshot) -> OwnPart:
        """Build this rank's part of the chain: rerun its stages and compare its gradients."""
        for stage, why in self._watched.unseen.items():
            self.refuse(f"stage {stage} was not observed, and cannot be run again: {why}")
        every, calls, unsure = self._collect()
        agreed, own = self._agreed, self._own
        of_line = {stage: one for part in agreed.of_line(every) for stage, one in part.items()}
        extra = ExtraCalls.among(of_line, agreed.data)
        again = self._reruns(every, extra, calls)
        left = own.gradients if named is None else named
        here, division, lost = self._rerun(again, left, snapshot)
        self._ledger.leave_out("gradient", again.of_the_loss, _OF_THE_LOSS)
        # Gradients are summed over replicas, then over stages that share a parameter.
        hooks, names = self._watched.comm_hooks(own), (agreed.first, agreed.copies, own.places)
        replicas = ReplicaSums(self._exchange, agreed.peers, self._shards, agreed.together, hooks)
        sums = {own.rename(one.stage, name): g for one in again.stages for name, g in one.gradients.items()}
        sums |= replicas.sum(sums)
        self._shares = StageShares(self._exchange, *names, self._bound_s, replica=agreed.line)
        expected = division.divide(sums | self._shares.join(None if self._why else sums))
        observed = {name: self._shards.in_whole(name, one, expected.get(name)) for name, one in here.items()}
        holders, doubts = (self._shards, replicas, self._shares), (self._begun, lost, dict(unsure))
        gradients = OwnGradients(self._ledger, agreed, division, *holders, *doubts, self._found)
        for one in again.stages:
            gradients.compare(one, again.chain.orders[one.stage].numbers, expected, observed)
        for stage, module in own.modules.items():
            silent = bool(again.calls[stage]) and all(call.silent and not call.ran for call in again.calls[stage])
            if silent and any(one.requires_grad for one in module.parameters()):
                self._ledger.doubt("presence", _SILENT.format(stage))
        extra.enter(self._ledger, again.calls)
        self._foresee(again, here, lost, unsure)
        self._found.causes += again.find_exchanged_targets(self._exchange.rank)
        self._found.scale = LossScale(division.scaled, self._by.scale) if division.declared else None
        self._found.forms = {name: torch.empty(0, dtype=one.dtype) for name, one in own.parameters.items()}
        return self._part_of(again, expected, gradients.unsure)

    def _collect(self) -> tuple[list[Mapping[int, StageCalls]], dict[int, list[Call]], dict[str, str]]:
        """Collect all ranks' stages, this rank's calls, and reasons why weights may be shared, by name."""
        calls = self._watched.calls(self.microbatches)
        with self.noting():
            if obstacle := self._shards.obstacle:
                raise RecordError(obstacle)
            self._early.check()
            self._begun.check_called(self._own, calls)
        untold = not self._agreed.known and self._by.contract.ties is None
        weights = weights_here(self._shards, self._weights, self._agreed.first) if untold else {}
        mine = self._watched.public_calls(self._exchange.rank, calls), weights
        both = self._gather(mine, "what stages received and sent in the checked step")
        every: list[Mapping[int, StageCalls]] = [one for one, _ in both]
        unsure = enter_equal(self._ledger, [one for _, one in both], self._agreed.only)
        if not any(one.calls for part in every for one in part.values()):
            self.refuse("no stage was called yet: call gradients() after the backwards of the step")
        return every, calls, unsure

    def _reruns(
        self, every: Sequence[Mapping[int, StageCalls]], extra: ExtraCalls, own: Mapping[int, Sequence[Call]]
    ) -> Reruns:
        """Set up the rerun of this rank's ``own`` calls, without ``extra`` ones, in the chain of all ranks."""
        agreed, first = self._agreed, self._agreed.only or 0
        left = {stage: extra.without_extra(stage, calls) for stage, calls in own.items()}
        chain, calls = together(Chain(extra.without, agreed.data), left)
        for why in refusals(chain):
            self.refuse(why)
        others = {stage: agreed.of_parts(every, stage, len(those)) for stage, those in calls.items()}
        given = [[[one.digest for one in call.inputs] for call in there] for there in others.get(first, ())]
        own_data = [[one.digest for one in call.inputs] for call in calls.get(first, ())]
        if agreed.together > 1 and any(there != own_data for there in given):
            self.refuse(_OTHER_DATA)
        modules, said = self._shards.modules(agreed.peers), self._by.contract
        declared = self._by.scaler is not None or said.loss_scale is not None
        divisor = agreed.own_divisor(said.loss_divisor, self.microbatches)
        counts = {len(one.data) for one in agreed.starts if one.data is not None}
        alike = said.loss_divisor is not None or len(counts) == 1
        return Reruns(
            Division(self._by.accumulation, self._scale, divisor, agreed.replicas, alike, declared),
            modules,
            calls,
            self._given,
            chain.with_flowing_gradients(),
            self._by.loss_fn,
            only=agreed.only,
            sums=self._shards.sums(modules),
            others=others if agreed.together > 1 else None,
            own_losses=self._watched.own_losses,
        )

    def _rerun(
        self, again: Reruns, left: Mapping[str, Gradient], snapshot: Snapshot
    ) -> tuple[dict[str, Tensor | None], Division, frozenset[int]]:
        """Run stages ``again``, in the way agreed by all ranks, after a step that ``left`` these gradients.

        Returns this rank's share of gradients, the division, and the stages with unknown results.
        """
        with self.noting():
            again.run()
            snapshot.put_back()
            for own in again.stages:
                self._begun.note_elsewhere(self._own, left, own, snapshot.wrote)
        mine, what = (again.note, self._shards.flat(left)), "what stages give again, and how losses are divided"
        every: list[tuple[RerunNote, Mapping[str, Shard]]] = self._gather(mine, what)
        notes = [note for note, _ in every]
        again.agree(self._agreed.of_line(notes))
        scaled = next((one for note in notes for one in note.scaled), again.division.scaled)
        factors = [factor for note in notes for factor in note.factors]
        division = replace(again.division, scaled=scaled).with_factors(factors)
        if unknown := division.doubt(self._ledger, len(self._agreed.run.microbatches)):
            self.refuse(unknown)
        for own in again.stages:
            own.times(division.times)
        here = self._shards.lying(left, [every[rank][1] for rank in self._agreed.peers.ranks])
        return here, division, frozenset(stage for note in notes for stage in note.lost)

    def _foresee(self, again: Reruns, here: Mapping[str, Any], lost: frozenset[int], unsure: Mapping[str, str]) -> None:
        """Predict the optimizer's update from the gradients ``here``."""
        optimizers, factor = self._by.optimizers, self._by.factor(0.0)
        if self._agreed.only is not None:
            return
        if self._by.needs_norm and (lost or unsure):
            if optimizers:
                self._after.give_up(not_known(lost) if lost else next(iter(unsure.values())))
            return
        if self._by.needs_norm:
            names = [
                (own.stage, self._own.rename(own.stage, name)) for own in again.stages for name in own.single_names
            ]
            gradients = {site: one for site in names if (one := here.get(site[1])) is not None}
            sizes = {(*site, self._shards.lies(site[1])): length_in_pieces(one) for site, one in gradients.items()}
            every = self._gather(sizes, "the norms of gradients, by which they are clipped, or a step is skipped")
            lengths = dict[Site, float]()
            for (stage, name, _), one in {part: one for each in every for part, one in each.items()}.items():
                lengths[stage, name] = math.hypot(lengths.get((stage, name), 0.0), one)
            factor = self._by.factor(norm_of(lengths, self._agreed.first))
        if optimizers:
            self._after.foresee(optimizers, self._shards.parameters, here, factor=factor)

    def _part_of(self, again: Reruns, expected: Mapping[str, Tensor | None], unsure: Mapping[str, str]) -> OwnPart:
        """Assemble this rank's part."""
        names = {self._own.rename(own.stage, name) for own in again.stages for name in own.single_names}
        known = {name: one for name in names if (one := expected[name]) is not None}
        lengths = {(self._own.places[name], name): length_in_pieces(one) for name, one in known.items()}
        weights = [one for module in again.modules.values() for one in module.parameters()]
        inside = [precision_of(own.inside) for own in again.stages if own.inside is not None]
        precision = coarsest([precision_among(weights), *inside])
        summed = coarsest([precision, *map(precision_of, self._shards.reduced_in.values())])
        links = {stage: (Link(),) * len(own) for stage, own in again.calls.items()}
        links |= {own.stage: tuple(own.links) for own in again.stages}
        stages = {stage: again.chain.stages[stage] for stage in again.calls}
        return OwnPart(self._ledger, stages, links, lengths, unsure, self._after.foreseen, precision, summed)

    def _finish(self) -> None:
        if self._why or self._obstacle or self._absent is not None:
            return
        if self._part_of_chain is None:
            self.refuse("gradients() was not called: call it between backward and clipping, on every rank")
        self._after.enter(self._weights, rank=self._exchange.rank)

    def _part(self, about: RankReport) -> tuple[RankReport, OwnPart, OwnEvidence]:
        begun = self._shards.digests_by_name(self._weights)
        own = replace(self._part_of_chain or OwnPart(self._ledger), reported=self._reported, weights=begun)
        own = replace(own, problem=self._why, no_norm=self._no_norm)
        return about, own, replace(self._found, causes=[*self._found.causes, *self._after.causes])

    def _conclude(self, parts: Sequence[tuple[RankReport, OwnPart, OwnEvidence]]) -> Verdict:
        reports, own, evidence = zip(*parts, strict=True)
        agreed = self._agreed
        obstacle = self._obstacle or describe_problems({report.rank: one.problem for report, one, _ in parts})
        said = obstacle and len(parts) == self._exchange.ranks  # the missing rank has given the reason
        ended = how_ranks_ended(reports, None if said else self._absent)
        weights = [one.weights for one in own]
        if agreed.together > 1:
            obstacle = obstacle or explain_hand_cut(weights, agreed.replica_of_rank)
        if ended is None and not obstacle:
            cure = self._rename.cure if isinstance(self._rename, AdapterNames) else RENAMED
            obstacle = not_one(agreed.of_line(weights), cure)
        if ended is not None or obstacle:
            return self._timed(not_compared(obstacle, ended))
        wholes = Whole.of(own, agreed, self._by)
        which = "" if agreed.only is None else f"stage {agreed.only} of "
        verdict = self._timed(judge(wholes, weights, title=f"{which}a step of this job, link by link"))
        return explain_safely(verdict, lambda: explain(verdict, wholes, evidence, agreed.replica_of_rank))

    def _close(self) -> None:
        self._early.close()
        self._watched.close()

    def _clear(self) -> None:
        self._close()
        self._shares.clear()
