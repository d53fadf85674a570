"""One step of a running job, held against itself link by link, so that no rank needs more than its own stages."""

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.foreign.chain import Chain, Data, StageSeen, counting, without_trials
from pipeproof.foreign.composed import Composed
from pipeproof.foreign.composed_parts import LAWS, OwnPart, Told, Unmeasured, Whole, norm_of, not_known
from pipeproof.foreign.handed_back import Gradient
from pipeproof.foreign.own_causes import own_causes
from pipeproof.foreign.own_links import Ending, OwnStage
from pipeproof.foreign.own_update import OwnUpdate
from pipeproof.foreign.reference_run import check_module, name_of
from pipeproof.judging.comparison import Comparison, Due
from pipeproof.judging.tolerance import FP32, Floor, precision_among
from pipeproof.judging.verdict import Crash, LawResult, Verdict, names_of
from pipeproof.observers.calls import Call
from pipeproof.observers.shards import is_plain
from pipeproof.observers.sketch import any_nonzero
from pipeproof.observers.watching import Watcher
from pipeproof.records.as_given import gradients_of, losses_of, number
from pipeproof.records.chain_start import ChainStart, problems_of
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.rank_part import Arrival, Rename, own_name, places_of, run_of, told
from pipeproof.records.record import RankStage, RecordError
from pipeproof.records.shares import StageShares
from pipeproof.records.step_parts import ended_otherwise
from pipeproof.records.step_record import Pairs
from pipeproof.reference.accumulation import length_of
from pipeproof.reference.again import drawing_on
from pipeproof.reference.step import Site, clip_factor, dense
from pipeproof.worlds.drawing import drawing_apart
from pipeproof.worlds.rank_report import RankReport, details, headline
from pipeproof.worlds.side_store import Exchange, RanksAbsent

_UNSPLIT = "replicas of stages are not checked so yet: check one replica, or against a SingleDevice"
_IN_PARTS = "stages of which ranks have parts are not checked so yet: check against a SingleDevice"


@dataclass(frozen=True)
class ChainPart:
    """What a rank saw of the step: how it ended, its part of the chain, and what is wrong."""

    report: RankReport
    own: OwnPart
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
        against: Composed,
        rename: Rename = own_name,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(modules, microbatches, laws=LAWS, rename=rename, timeout_s=timeout_s)
        self._by = against
        self._watcher = Watcher(keep=against.keep)
        self._places: dict[str, list[RankStage]] = {}
        self._one_name: dict[str, str] | None = None  # of each of the model's, the first that the parameter has
        self._first: Mapping[str, str] = {}  # as far as that is known where nobody knows the model
        self._start = ChainStart(None)
        self._data: Data = []
        self._told: list[Told] = []
        self._shares = StageShares(Exchange(None), {}, {}, {}, self._bound_s)
        self._update: OwnUpdate | None = None
        self._begun: dict[str, Tensor] = {}
        self._late = 1.0  # what gradients are divided by once they are summed, in place of the losses
        self._lost: set[int] = set()  # stages of which it is not known what they give
        self._part_of_chain: OwnPart | None = None

    @property
    def microbatches(self) -> int:
        """How many the step is of."""
        return len(self._data)

    @property
    def _divisor(self) -> float:
        return float(self._by.loss_divisor or len(self._data) or 1)

    def begin(self, gradients: Mapping[str, Gradient]) -> None:
        with self.noting():
            there = {name: one for name, one in gradients.items() if isinstance(one, Tensor) and is_plain(one)}
            self._begun = {name: self._by.keep(one) for name, one in there.items() if any_nonzero(one)}

    def report(
        self,
        *,
        losses: Sequence[float] | None = None,
        loss: float | None = None,
        norm: float | None = None,
        in_order: bool = True,
    ) -> None:
        with self.noting():
            known = None if losses is None else tuple(losses_of(losses))
            whole = None if loss is None else number("loss", loss)
            self._told.append(Told(known, whole, None if norm is None else number("norm", norm), in_order))

    def gradients(self, named: Mapping[str, Gradient] | None = None) -> None:
        self._watcher.close()
        if self._obstacle or self._absent is not None or self._part_of_chain is not None:
            return
        with self.noting(), drawing_apart(), drawing_on(self._own.modules.values()):
            try:
                self._part_of_chain = self._made(named)
            except RanksAbsent as absent:
                self._absent = absent

    def _begin(self) -> str:
        with self.noting():
            self._take_given()
            self._by.check()
            self._refuse_parts()
            self._start = ChainStart.of(self._given, self._own, self._by)
            self._one_name = self._names_of_model()
        arrivals: list[Arrival] = self._arrivals()
        problems = {rank: arrival.problem for rank, arrival in enumerate(arrivals) if arrival.problem}
        run, wrong = run_of(arrivals)
        problems = problems or wrong or ({0: _UNSPLIT} if run.count > 1 else {})
        if problems:
            return told(problems)
        every = self._gather(self._start.with_data(self._given), "the microbatches of the checked step")
        if problems := problems_of(every):
            return told(problems)
        self._run, self._places = run, places_of(arrivals)
        self._data = next(one.data for one in every if one.data is not None)
        shared = {name: first for one in every for name, first in one.first.items()}
        self._first = shared if self._one_name is None else self._one_name
        self.begin(self._own.gradients)
        for module in self._own.modules.values():
            self._watcher.watch(module)
        return ""

    def _refuse_parts(self) -> None:
        if self._own.shards:
            raise RecordError(_IN_PARTS)

    def _names_of_model(self) -> dict[str, str] | None:
        if self._by.build is None:
            return None
        with drawing_apart(), torch.device("meta"):
            model = self._by.build()
        check_module(f"build, {name_of(self._by.build)}, returned", model)
        first: dict[int, str] = {}
        return {n: first.setdefault(id(one), n) for n, one in model.named_parameters(remove_duplicate=False)}

    def _made(self, named: Mapping[str, Gradient] | None) -> OwnPart:
        """This rank's part of the chain: its stages run again, and its gradients compared with what they give."""
        calls = {
            stage: counting(self._watcher.calls(module) or [], self.microbatches)
            for stage, module in self._own.modules.items()
        }
        with self.noting():
            self._refuse_uncalled(calls)
        seen = {
            stage: StageSeen(self._exchange.rank, tuple(replace(call, again=None) for call in own))
            for stage, own in calls.items()
        }
        every = self._gather(seen, "what stages received and sent in the checked step")
        if not any(one.calls for part in every for one in part.values()):
            self.refuse("no stage was called yet: call gradients() after the backwards of the step")
        chain = Chain(
            without_trials({stage: one for part in every for stage, one in part.items()}, self._data), self._data
        )
        seen = {stage: chain.stages[stage] for stage in seen}
        calls = {stage: own[len(own) - len(seen[stage].calls) :] for stage, own in calls.items()}
        stages: list[OwnStage] = []
        with self.noting():
            stages = [self._run_again(stage, chain, own) for stage, own in sorted(calls.items(), reverse=True)]
        lost = [own.stage for own in stages if not own.closed]
        told_of = self._gather((lost, self._late), "which stages give the same again, and how losses are divided")
        self._lost, self._late = set().union(*(one for one, _ in told_of)), max(late for _, late in told_of)
        sums = {self._own.rename(own.stage, name): one for own in stages for name, one in own.gradients.items()}
        self._shares = StageShares(self._exchange, self._first, self._places, self._own.places, self._bound_s)
        due = self._divided(sums | self._shares.join(None if self._why else sums))
        found = _dense(self._own.gradients if named is None else gradients_of(named, self._own.places))
        part = OwnPart(self._ledger, seen)
        for own in stages:
            part = self._compared(part, own, chain.orders[own.stage].numbers, due, found)
        one_each = {self._own.rename(own.stage, name) for own in stages for name in own.single_names}
        due_each = {name: one for name in one_each if (one := due[name]) is not None}
        lengths = {(self._own.places[name], name): length_of(one) for name, one in due_each.items()}
        self._foresee(lengths)
        held = [one for module in self._own.modules.values() for one in module.parameters()]
        links = {own.stage: tuple(own.links) for own in stages}
        foreseen = self._update is not None
        return replace(part, links=links, lengths=lengths, foreseen=foreseen, precision=precision_among(held))

    def _refuse_uncalled(self, calls: Mapping[int, Sequence[Call]]) -> None:
        """Raise ``RecordError`` for a stage that computes, as its gradients show, and not in calls that are seen."""
        for stage, module in self._own.modules.items():
            own = calls[stage]
            wanting = [(name, one.grad) for name, one in module.named_parameters() if one.requires_grad]
            grown = any(self._grown(self._own.rename(stage, name), gradient) for name, gradient in wanting)
            if not own and (grown or not wanting):
                raise RecordError(
                    f"no call of stage {stage}'s module was seen: pass the very module that is called, "
                    "and call it itself, not its forward, nor compiled"
                )
            if len(own) >= 2 * self.microbatches and _on_its_own(own):
                raise RecordError(
                    f"stage {stage}'s module is called on what it gave itself: pass one that makes all of its calls "
                    "for a microbatch in one"
                )

    def _grown(self, name: str, gradient: Tensor | None) -> bool:
        if gradient is None or not any_nonzero(dense(gradient)):
            return False
        begun = self._begun.get(name)
        return begun is None or not torch.equal(begun.to(gradient.device), dense(gradient))

    def _run_again(self, stage: int, chain: Chain, calls: Sequence[Call]) -> OwnStage:
        """A stage of this rank, run once more."""
        calls = [_wanting(call, more) for call, more in zip(calls, chain.lost(stage), strict=True)]
        if stage < chain.last:
            return self._once_more(stage, calls, None)
        ending = self._ending(chain.orders[stage].numbers)
        undivided, late = replace(ending, divisor=1.0), self._by.accumulation.late
        own = self._once_more(stage, calls, undivided if late else ending)
        if not late and not own.received and self._divisor != 1.0:  # a runtime may divide gradients at last
            other = self._once_more(stage, calls, undivided)
            own, late = (other, True) if other.received else (own, False)
        self._late = self._divisor if late else 1.0
        return own

    def _once_more(self, stage: int, calls: Sequence[Call], ending: Ending | None) -> OwnStage:
        own = OwnStage(stage, self._own.modules[stage], calls, ending=ending, accumulation=self._by.accumulation)
        own.run()
        if other := [name for name in own.unreached if self._grown(self._own.rename(stage, name), own.grad_of(name))]:
            told = f"no backward through stage {stage} gives what is in .grad of {names_of(other)}: it is put off, or"
            own.links[0] = replace(own.links[0], obstacle=f"{told} other code writes it")
        return own

    def _divided(self, sums: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """``sums`` by what the runtime divides them at last."""
        late = self._late
        return {name: one if one is None or late == 1.0 else one / late for name, one in sums.items()}

    def _undivided(self, seen: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was ``seen``, as if it were not divided yet: of such are what causes are sought by."""
        late = self._late
        return {name: one * late if isinstance(one, Tensor) and late != 1.0 else one for name, one in seen.items()}

    def _ending(self, numbers: Sequence[int]) -> Ending:
        if self._given is None:
            raise RecordError("the last stage is here, and its targets are not: pass microbatches on its rank, too")
        return Ending(self._by.loss_fn, self._divisor, [self._given[m][1] if m >= 0 else None for m in numbers])

    def _compared(
        self,
        part: OwnPart,
        own: OwnStage,
        numbers: Sequence[int],
        due: Mapping[str, Tensor | None],
        seen: Mapping[str, Any],
    ) -> OwnPart:
        """``part`` with what is wrong with the gradients of a stage, and why."""
        names = {self._own.rename(own.stage, name): name for name in own.gradients}
        if not own.closed:
            self._ledger.leave_out("gradient", list(names), not_known([own.stage]))
            return part
        for name, stages in self._shares.stages_of(names).items():
            if self._lost & stages:
                self._ledger.leave_out("gradient", [name], not_known(self._lost & stages))
                del names[name]
        allowed, before = _Allowed(FP32, own, names), len(self._ledger.mismatches)
        at = Comparison(Due("train", (), (), gradients={name: due[name] for name in names}), allowed, self._ledger)
        for name in [one for one in reversed(names) if one in seen]:
            at.gradient(name, seen[name], rank=self._exchange.rank, stage=own.stage)
        at.close()
        self._ledger.leave_out("gradient", [one for one in names if one not in seen], "not compared")
        wrong = {one.parameter for one in self._ledger.mismatches[before:]}
        if not wrong:
            return part
        seen = self._undivided(seen)
        shared = {name for names in self._shares.copies.values() for name in names.values()}
        copies = [
            self._shares.looked_at(name, seen[name], allowed.gradient(name).limit) for name in names if name in shared
        ]
        alone = {name: at for name, at in names.items() if name not in shared}
        part = replace(part, copies=(*part.copies, *copies))
        if wrong <= shared:
            return part
        begun = {name: self._begun.get(name) for name in alone}
        found = own_causes(own, self._ledger, numbers, seen, alone, begun, rank=self._exchange.rank)
        return replace(part, causes=(*part.causes, *found.cause), undecided=(*part.undecided, *found.undecided))

    def _foresee(self, lengths: Mapping[Site, float]) -> None:
        """Note what the optimizer is going to make of the gradients."""
        optimizer, most = self._by.optimizer, self._by.max_norm
        if most < math.inf and self._lost:
            self._ledger.doubt("updated-parameters", not_known(self._lost))
            return
        if most < math.inf:
            every = self._gather(lengths, "the norms of gradients, to which they are clipped")
            whole = norm_of({site: one for each in every for site, one in each.items()}, self._first)
            factor = clip_factor(whole, most)
        if optimizer is not None:
            own = {
                self._own.rename(stage, name): one
                for stage, module in self._own.modules.items()
                for name, one in module.named_parameters(remove_duplicate=False)
            }
            self._update = OwnUpdate.by(optimizer, own, factor=factor if most < math.inf else 1.0)

    def _finish(self) -> None:
        if self._why or self._obstacle or self._absent is not None:
            return
        if self._part_of_chain is None:
            self.refuse("gradients() was not called: call it between backward and clipping, on every rank")
        if self._update is not None:
            due = Due("train", (), (), before=self._update.before, parameters=self._update.after)
            at = Comparison(due, Unmeasured(precision_among(self._update.before.values())), self._ledger)
            for name, one in self._own.parameters.items():
                if name in self._update.after:
                    at.parameter(name, one, rank=self._exchange.rank, stage=self._own.places[name])

    def _part(self, about: RankReport) -> ChainPart:
        own = replace(self._part_of_chain or OwnPart(self._ledger), told=tuple(self._told))
        return ChainPart(about, own, self._why, self._crash, self._no_norm)

    def _concluded(self, parts: Sequence[ChainPart]) -> Verdict:
        rerun = f"torchrun --nproc-per-node {self._exchange.ranks} {shlex.join(sys.argv)}"
        seconds = perf_counter() - self._began
        ended = ended_otherwise([part.report for part in parts], self._absent)
        obstacle = self._obstacle or told({part.report.rank: part.problem for part in parts})
        if ended is not None or obstacle:
            laws = (LawResult("comparable", "unknown", note=obstacle),) if obstacle else ()
            blank = Verdict("a step of this job", "unknown", "none", laws, seconds=seconds, rerun=rerun)
            if ended is None:
                return blank
            known, how = ended
            return replace(blank, headline=headline(known), failure=details(known), ended=how)
        no_norm = next((part.no_norm for part in parts if part.no_norm), "")
        owned, counted = [part.own for part in parts], self._one_name is not None
        whole = Whole(owned, self._data, self._divisor, self._places, self._first, counted, no_norm)
        return whole.verdict("a step of this job, link by link", rerun=rerun, seconds=seconds)

    def _clear(self) -> None:
        self._watcher.close()
        self._shares.clear()


def _wanting(call: Call, more: frozenset[int]) -> Call:
    """``call``, where a gradient of these inputs, too, is asked for when it is run again."""
    if not more or call.again is None:
        return call
    return replace(call, again=replace(call.again, wanting=call.again.wanting | more))


def _on_its_own(calls: Sequence[Call]) -> bool:
    """Whether a module was called on what another call of it made."""
    made = {one.digest for call in calls for one in call.outputs if one.norm and one not in call.inputs}
    return any(one.digest in made for call in calls for one in call.inputs)


def _dense(gradients: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dense(one) if isinstance(one, Tensor) else one for name, one in gradients.items()}


@dataclass(frozen=True)
class _Allowed(Unmeasured):
    """What rounding may do to a stage's gradients, measured where one is not as it was to the bit."""

    own: OwnStage
    names: Mapping[str, str]

    def gradient(self, name: str) -> Floor:
        return self.own.floors.gradient_by_microbatch((self.own.stage, self.names[name]))
