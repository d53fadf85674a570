"""One step of a running job, held against itself link by link, so that no rank needs more than its own stages."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import coarsest, precision_among, precision_of
from pipeproof.core.verdict import Crash, Verdict
from pipeproof.explain.explain import sought
from pipeproof.explain.loss_scale import LossScale
from pipeproof.foreign.handed_back import Gradient
from pipeproof.foreign.loss_of_all import LossOfAll
from pipeproof.observers.calls import Call
from pipeproof.observers.digest import contents
from pipeproof.observers.shards import Shard
from pipeproof.observers.watching import Watcher
from pipeproof.records.as_given import gradients_of, losses_of, number
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.rank_part import AdapterNames, Arrival, Rename, own_name, places_of, run_of, told
from pipeproof.records.record import RankStage, RecordError
from pipeproof.records.step_parts import ended_otherwise, not_compared
from pipeproof.records.step_record import Pairs
from pipeproof.reference.accumulation import PLAIN
from pipeproof.reference.again import undisturbed
from pipeproof.wings.composed.causes import OwnEvidence, explain
from pipeproof.wings.composed.chain import Chain
from pipeproof.wings.composed.collect import Begun, EarlyStep, WatchedStages
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.division import Division
from pipeproof.wings.composed.gradients import OwnGradients
from pipeproof.wings.composed.held_gradients import length_in_pieces
from pipeproof.wings.composed.lines import RankLines
from pipeproof.wings.composed.link import Link, StageSeen
from pipeproof.wings.composed.own_calls import ExtraCalls, together
from pipeproof.wings.composed.peers import Peers
from pipeproof.wings.composed.rerun import StageRerun
from pipeproof.wings.composed.reruns import RerunNote, Reruns
from pipeproof.wings.composed.shards import OwnShards, Part, lengths_of, other_data
from pipeproof.wings.composed.sources import Data
from pipeproof.wings.composed.start import ChainStart, names_in, placement_of, problems_of
from pipeproof.wings.composed.sums import ReplicaSums
from pipeproof.wings.composed.ties import StageShares
from pipeproof.wings.composed.update import WeightsAfter
from pipeproof.wings.composed.weights import RENAMED, cut_by_hand, enter_equal, not_one, weights_here
from pipeproof.wings.composed.whole import LAWS, OwnPart, Reported, Whole, judge, norm_of, not_known
from pipeproof.wings.composed.wiring import refusals
from pipeproof.worlds.drawing import drawing_apart
from pipeproof.worlds.rank_report import RankReport
from pipeproof.worlds.side_store import Exchange, RanksAbsent

_UNSPLIT = "there are replicas, and nobody tells whose microbatches are whose: pass each replica those that it runs"
_OF_THE_LOSS = "the loss trains weights that no stage holds: let the last stage's module hold them"


@dataclass(frozen=True)
class ChainPart:
    """What a rank saw of the step: how it ended, its part of the chain, and what is wrong."""

    report: RankReport
    own: OwnPart
    found: OwnEvidence
    problem: str = ""
    crash: Crash | None = None
    no_norm: str = ""


class ComposedCheck(CheckedStep):
    """A step held against itself: every rank runs its own stages again, and neighbours compare what passed."""

    def __init__(
        self,
        modules: nn.Module | Mapping[int, nn.Module],
        microbatches: Pairs | None,
        *,
        against: AgainstItself,
        rename: Rename = own_name,
        timeout_s: float = 300.0,
        turn: int = 0,
    ) -> None:
        super().__init__(modules, microbatches, laws=LAWS, rename=rename, timeout_s=timeout_s)
        self._by, self._turn = against, turn
        self._only: int | None = None  # the one stage that is run again, if not all are
        self._watched = WatchedStages(against)
        self._weights: dict[int, dict[str, bytes]] = {}  # of stages that are run again, as the step began
        self._places: dict[str, list[RankStage]] = {}
        self._one_name: dict[str, str] | None = None  # of each of the model's, the first that the parameter has
        self._first: Mapping[str, str] = {}  # as far as that is known where nobody knows the model
        self._start = ChainStart(None)
        self._starts: Sequence[ChainStart] = ()
        self._division = Division(PLAIN)
        self._shards = OwnShards(self._own)
        self._lines = RankLines()
        self._data: Data = []
        self._reported = Reported()
        self._shares = StageShares(Exchange(None), {}, {}, {}, self._bound_s)
        self._after = WeightsAfter(self._own, self._ledger)
        self._begun, self._early = Begun(against.keep), EarlyStep()
        self._scale = 1.0  # what losses were scaled by as the step began
        self._lost: frozenset[int] = frozenset()  # stages of which it is not known what they give
        self._unsure: Mapping[str, str] = {}  # weights of which nobody knows whether they are one, and why
        self._part_of_chain: OwnPart | None = None
        self._found = OwnEvidence()

    @property
    def microbatches(self) -> int:
        """How many the step is of."""
        return len(self._data)

    def seen_by(self, watcher: Watcher) -> None:
        """The step is over, and ``watcher`` saw the calls of all stages; their weights are those that it began with."""
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
        known: Mapping[str, Gradient] | None = {}  # where they are of no use: others wait for this rank all the same
        with self.noting():
            known = None if named is None else gradients_of(named, self._own.places)
        given = self._given, self._watched.arguments
        state = self._by.unchanged(self._own.modules, given, self._weights, self.refuse)
        with self.noting(), state as self._snapshot, drawing_apart(), undisturbed(self._own.modules.values()):
            try:
                self._part_of_chain = self._made(known)
            except RanksAbsent as absent:
                self._absent = absent

    def _begin(self) -> str:
        with self.noting():
            self._take_given()
            self._by.check()
            self._shards = OwnShards(self._own)
            if obstacle := self._shards.obstacle:
                raise RecordError(obstacle)
            self._start = ChainStart.of(self._given, self._own, self._by, together=self._shards.together)
            whole = self._by.whole()
            self._one_name = None if whole is None else names_in(whole)
        arrivals: list[Arrival] = self._arrivals()
        problems = {rank: arrival.problem for rank, arrival in enumerate(arrivals) if arrival.problem}
        run, wrong = run_of(arrivals)
        if problems := problems or wrong:
            return told(problems)
        every = self._gather(self._start.with_data(self._given), "the microbatches of the checked step")
        lines = RankLines.of(run, self._exchange.rank, arrivals, together=max(one.together for one in every))
        if problems := problems_of(every, run.replicas) or ({} if lines.split else {0: _UNSPLIT}):
            return told(problems)
        self._run, self._lines, self._places, self._starts = run, lines, places_of(arrivals), every
        self._shards = OwnShards(self._own, [arrival.shards for arrival in arrivals])
        self._peers = Peers(self._exchange.rank, [one.stages for one in every], self._bound_s)
        self._data = next(one.data for one in self._lines.of_line(every) if one.data is not None)
        shared = {name: first for one in every for name, first in one.first.items()}
        self._first = shared if self._one_name is None else self._one_name
        if isinstance(self._by.loss_fn, LossOfAll):
            self._take_loss(self._by.loss_fn)
        self.begin(self._own.gradients)
        self._early.open(one for module in self._own.modules.values() for one in module.parameters())
        self._scale = self._by.scale
        self._after = WeightsAfter(self._own, self._ledger, self._by.masters)
        last = max(stage for one in every for stage in one.stages)
        self._only = self._by.only(self._turn, last + 1)
        for stage, module in self._own.modules.items():
            self._watched.watch(stage, module, kept=self._only is None or stage in (self._only, last))
            if self._only in (None, stage):
                self._weights[stage] = contents(module)
        return ""

    def _take_loss(self, loss_fn: LossOfAll) -> None:
        """Make the loss of the targets of all replicas."""
        targets = None if self._given is None else [(None, target) for _, target in self._given]
        every = self._lines.all_pairs(self._gather(targets, "the targets of all microbatches"))
        with self.noting():
            self._by = replace(self._by, loss_fn=loss_fn.of(every))

    def _made(self, named: Mapping[str, Gradient] | None) -> OwnPart:
        """This rank's part of the chain: its stages run again, and its gradients compared with what they give."""
        for stage, why in self._watched.unseen.items():
            self.refuse(f"stage {stage} was not seen, and cannot be run again: {why}")
        every, calls = self._heard()
        lines = self._lines
        own_chain = {stage: one for part in lines.of_line(every) for stage, one in part.items()}
        extra = ExtraCalls.among(own_chain, self._data)
        calls = {stage: extra.left(stage, own) for stage, own in calls.items()}
        chain, calls = together(Chain(extra.without, self._data), calls)
        for why in refusals(chain):
            self.refuse(why)
        others = {stage: lines.of_parts(every, stage, len(own)) for stage, own in calls.items()}
        first = self._only or 0
        if lines.together > 1 and (obstacle := other_data(calls.get(first, ()), others.get(first, ()))):
            self.refuse(obstacle)
        modules, chain = self._shards.modules(self._peers), chain.with_due_gradients()
        self._division = self._divided()
        loss_fn, only = self._by.loss_fn, self._only
        again = Reruns(self._division, modules, calls, self._given, chain, loss_fn, only, self._shards.sums(modules))
        again.in_parts, again.others, again.own_losses = lines.together > 1, others, self._watched.own_losses
        here = self._rerun(again, named)
        chain, stages = again.chain, again.stages
        self._ledger.leave_out("gradient", again.of_the_loss, _OF_THE_LOSS)
        due = self._summed(stages)
        found = {name: self._shards.in_whole(name, one, due.get(name)) for name, one in here.items()}
        sums = self._shards, self._replicas, self._shares
        placement = placement_of(lines.of_line([(rank, one.stages) for rank, one in enumerate(self._starts)]))
        gradients = OwnGradients(self._own, self._ledger, *sums, self._division, lines, placement)
        gradients = replace(gradients, begun=self._begun, lost=self._lost, only=self._only, found=self._found)
        gradients.unsure.update(self._unsure)
        for own in stages:
            gradients.compare(own, chain.orders[own.stage].numbers, due, found)
        for why in self._begun.without_gradients(self._own, calls):
            self._ledger.doubt("presence", why)
        extra.enter(self._ledger, calls)
        one_each = {self._own.rename(own.stage, name) for own in stages for name in own.single_names}
        due_each = {name: one for name in one_each if (one := due[name]) is not None}
        lengths = {(self._own.places[name], name): length_in_pieces(one) for name, one in due_each.items()}
        parts = {part: one for own in stages for part, one in self._shards.sizes(own.stage, here).items()}
        self._foresee(parts, here)
        held = [one for module in modules.values() for one in module.parameters()]
        self._found.causes += again.exchanged_targets(self._exchange.rank)
        self._found.scale = self._scaling
        self._found.forms = {name: torch.empty(0, dtype=one.dtype) for name, one in self._own.parameters.items()}
        links = {stage: (Link({}),) * len(own) for stage, own in calls.items()}
        links |= {own.stage: tuple(own.links) for own in stages}
        seen = {k: chain.stages[k] for k in calls}
        inside = [precision_of(own.inside) for own in stages if own.inside is not None]
        precision = coarsest([precision_among(held), *inside])
        summed = coarsest([precision, *map(precision_of, self._shards.reduced_in.values())])
        foreseen = self._after.foreseen
        return OwnPart(self._ledger, seen, links, lengths, gradients.unsure, foreseen, precision, summed)

    def _heard(self) -> tuple[list[Mapping[int, StageSeen]], dict[int, list[Call]]]:
        """What all ranks saw of their stages, and the calls of this one's."""
        calls = self._watched.calls(self.microbatches)
        with self.noting():
            if obstacle := self._shards.obstacle:
                raise RecordError(obstacle)
            self._early.check()
            self._begun.check_called(self._own, calls)
        untold = self._one_name is None and self._by.contract.ties is None
        weights = weights_here(self._shards, self._weights, self._first) if untold else {}
        mine = self._watched.seen(self._exchange.rank, calls), weights
        both = self._gather(mine, "what stages received and sent in the checked step")
        every: list[Mapping[int, StageSeen]] = [seen for seen, _ in both]
        self._unsure = enter_equal(self._ledger, [held for _, held in both], self._only)
        if not any(one.calls for part in every for one in part.values()):
            self.refuse("no stage was called yet: call gradients() after the backwards of the step")
        return every, calls

    def _rerun(self, again: Reruns, named: Mapping[str, Gradient] | None) -> dict[str, Tensor | None]:
        """Run stages ``again``, in the way that all ranks agree upon; what this rank has of gradients."""
        left = self._own.gradients if named is None else named
        with self.noting():
            again.run(self._snapshot, partial(self._begun.note_elsewhere, self._own, left))
        mine, what = (again.note, self._shards.flat(left)), "what stages give again, and how losses are divided"
        every: list[tuple[RerunNote, Mapping[str, Shard]]] = self._gather(mine, what)
        notes = [note for note, _ in every]
        self._lost = frozenset(stage for note in notes for stage in note.lost)
        again.agree(self._lines.of_line(notes))
        scaled = next((one for note in notes for one in note.scaled), self._division.scaled)
        division = replace(self._division, scaled=scaled)
        self._division = division.with_factors([factor for note in notes for factor in note.factors])
        if unknown := self._division.doubt(self._ledger, len(self._run.microbatches)):
            self.refuse(unknown)
        for own in again.stages:
            own.times(self._division.times)
        return self._shards.lying(left, [every[rank][1] for rank in self._peers.ranks])

    def _divided(self) -> Division:
        """How the contract divides."""
        said, lines = self._by.contract, self._lines
        declared = said.loss_scale is not None or self._by.scaler is not None
        own = lines.own_divisor(said.loss_divisor, self.microbatches)
        return Division(self._by.accumulation, self._scale, own, lines.replicas, self._alike, declared)

    def _summed(self, stages: Sequence[StageRerun]) -> dict[str, Tensor | None]:
        """What gradients must be, by name: over replicas first, then over stages that share a parameter."""
        sums = {self._own.rename(own.stage, name): one for own in stages for name, one in own.gradients.items()}
        hooks = self._watched.comm_hooks(self._own)
        self._replicas = ReplicaSums(self._exchange, self._peers, self._shards, self._lines.together, hooks)
        sums |= self._replicas.summed(sums)
        both, own = (self._exchange, self._first), self._own.places
        self._shares = StageShares(*both, self._places, own, self._bound_s, replica=self._lines.own)
        return self._division.divided(sums | self._shares.join(None if self._why else sums))

    @property
    def _alike(self) -> bool:
        """Whether it is known to be the same in all replicas what losses are divided by."""
        counts = {len(one.data) for one in self._starts if one.data is not None}
        return self._by.contract.loss_divisor is not None or len(counts) == 1

    @property
    def _scaling(self) -> LossScale | None:
        """How losses are scaled, if a scaler or the contract says so."""
        said = self._by.scaler is not None or self._by.contract.loss_scale is not None
        return LossScale(self._division.scaled, self._by.scale) if said else None

    def _foresee(self, sizes: Mapping[Part, float], gradients: Mapping[str, Any]) -> None:
        """Note what the optimizer is going to make of ``gradients``."""
        optimizers, factor = self._by.optimizers, self._by.factor(0.0)
        if self._only is not None:
            return
        if self._by.needs_norm and (self._lost or self._unsure):
            if optimizers:
                self._after.give_up(not_known(self._lost) if self._lost else next(iter(self._unsure.values())))
            return
        if self._by.needs_norm:
            every = self._gather(sizes, "the norms of gradients, by which they are clipped, or a step is skipped")
            parts = {part: one for each in every for part, one in each.items()}
            factor = self._by.factor(norm_of(lengths_of(parts), self._first))
        if optimizers:
            self._after.foresee(optimizers, self._shards.parameters, gradients, factor=factor)

    def _finish(self) -> None:
        if self._why or self._obstacle or self._absent is not None:
            return
        if self._part_of_chain is None:
            self.refuse("gradients() was not called: call it between backward and clipping, on every rank")
        self._after.enter(self._weights, rank=self._exchange.rank)

    def _part(self, about: RankReport) -> ChainPart:
        begun = self._shards.named(self._weights)
        own = replace(self._part_of_chain or OwnPart(self._ledger), reported=self._reported, weights=begun)
        found = replace(self._found, causes=[*self._found.causes, *self._after.causes])
        return ChainPart(about, own, found, self._why, self._crash, self._no_norm)

    def _concluded(self, parts: Sequence[ChainPart]) -> Verdict:
        rerun = f"torchrun --nproc-per-node {self._exchange.ranks} {shlex.join(sys.argv)}"
        seconds = perf_counter() - self._began
        obstacle = self._obstacle or told({part.report.rank: part.problem for part in parts})
        said = obstacle and len(parts) == self._exchange.ranks  # who was missed has said why
        ended = ended_otherwise([part.report for part in parts], None if said else self._absent)
        if self._lines.together > 1:
            obstacle = obstacle or cut_by_hand([one.own.weights for one in parts], self._lines.replica_of_rank)
        if ended is None and not obstacle:
            cure = self._rename.cure if isinstance(self._rename, AdapterNames) else RENAMED
            obstacle = not_one([one.own.weights for one in self._lines.of_line(parts)], cure)
        if ended is not None or obstacle:
            return replace(not_compared(obstacle, ended), seconds=seconds, rerun=rerun)
        no_norm = next((part.no_norm for part in parts if part.no_norm), "")
        owned, counted = [part.own for part in parts], self._one_name is not None
        wholes = []
        for line in range(self._lines.count):
            mine = [of == line for of in self._run.replicas]
            own = [one if here else OwnPart(Ledger(LAWS)) for one, here in zip(owned, mine, strict=True)]
            brought = (one.data for one, here in zip(self._starts, mine, strict=True) if here)
            data = next(one for one in brought if one is not None)
            of_all = self._places, self._first, counted, no_norm
            divisor = self._lines.own_divisor(self._by.contract.loss_divisor, len(data))
            wholes.append(Whole(own, data, divisor, *of_all, only=self._only, by=self._by))
        which = "" if self._only is None else f"stage {self._only} of "
        title, replicas = f"{which}a step of this job, link by link", self._lines.replica_of_rank
        weights = [one.weights for one in owned]
        verdict = judge(wholes, weights, title=title, rerun=rerun, seconds=seconds)
        return sought(verdict, lambda: explain(verdict, wholes, [part.found for part in parts], replicas))

    def _close(self) -> None:
        self._early.close()
        self._watched.close()

    def _clear(self) -> None:
        self._close()
        self._shares.clear()
