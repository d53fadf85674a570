"""One step of a running job, held against itself link by link, so that no rank needs more than its own stages."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.foreign.chain import Chain, StageSeen, counting
from pipeproof.foreign.composed import Composed
from pipeproof.foreign.composed_parts import LAWS, OwnPart, Told, Whole
from pipeproof.foreign.handed_back import Gradient
from pipeproof.foreign.own_causes import own_causes
from pipeproof.foreign.own_links import Ending, OwnStage
from pipeproof.judging.cause import Cause
from pipeproof.judging.comparison import Comparison, Due
from pipeproof.judging.tolerance import Floor, precision_among
from pipeproof.judging.verdict import Crash, LawResult, Verdict
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.observers.watching import Watcher, tensors_in
from pipeproof.records.as_given import gradients_of, losses_of, number
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.rank_part import Arrival, Rename, own_name, places_of, run_of, told
from pipeproof.records.record import RankStage, RecordError
from pipeproof.records.step_parts import ended_otherwise
from pipeproof.records.step_record import Pairs
from pipeproof.worlds.drawing import drawing_apart
from pipeproof.worlds.rank_report import RankReport, details, headline
from pipeproof.worlds.side_store import RanksAbsent

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
        self._model_names: tuple[str, ...] | None = None
        self._data: list[list[Sketch]] = []
        self._told: list[Told] = []
        self._part_of_chain: OwnPart | None = None

    @property
    def _divisor(self) -> float:
        return float(self._by.loss_divisor or len(self._data) or 1)

    def begin(self, gradients: Mapping[str, Gradient]) -> None:
        """What gradients are added to is seen by this check itself."""

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
        with self.noting(), drawing_apart():
            try:
                self._part_of_chain = self._made(named)
            except RanksAbsent as absent:
                self._absent = absent

    def _begin(self) -> str:
        with self.noting():
            self._take_given()
            self._by.check()
            self._refuse_parts()
            self._model_names = self._names_of_model()
        arrivals: list[Arrival] = self._arrivals()
        problems = {rank: arrival.problem for rank, arrival in enumerate(arrivals) if arrival.problem}
        run, wrong = run_of(arrivals)
        problems = problems or wrong or ({0: _UNSPLIT} if run.count > 1 else {})
        if problems:
            return told(problems)
        self._run, self._places = run, places_of(arrivals)
        own = None if self._given is None else [list(map(sketch, tensors_in(inputs))) for inputs, _ in self._given]
        every = self._gather(own, "the microbatches of the checked step")
        self._data = next(one for one in every if one is not None)
        for module in self._own.modules.values():
            self._watcher.watch(module)
        return ""

    def _refuse_parts(self) -> None:
        if self._own.shards:
            raise RecordError(_IN_PARTS)

    def _names_of_model(self) -> tuple[str, ...] | None:
        if self._by.build is None:
            return None
        with drawing_apart(), torch.device("meta"):
            model = self._by.build()
        return tuple(name for name, _ in model.named_parameters(remove_duplicate=False))

    def _made(self, named: Mapping[str, Gradient] | None) -> OwnPart:
        """This rank's part of the chain: its stages run again, and its gradients compared with what they give."""
        calls = {
            stage: counting(self._watcher.calls(module) or [], len(self._data))
            for stage, module in self._own.modules.items()
        }
        seen = {
            stage: StageSeen(self._exchange.rank, tuple(replace(call, again=None) for call in own))
            for stage, own in calls.items()
        }
        every = self._gather(seen, "what stages received and sent in the checked step")
        chain = Chain({stage: one for part in every for stage, one in part.items()}, self._data)
        stages = []
        for stage, module in sorted(self._own.modules.items(), reverse=True):
            numbers = chain.orders[stage].numbers
            ending = self._ending(numbers) if stage == chain.last else None
            own = OwnStage(stage, module, calls[stage], ending=ending, accumulation=self._by.accumulation)
            own.run()
            stages.append(own)
        found = self._own.gradients if named is None else gradients_of(named, self._own.places)
        due = self._due(stages)
        causes: list[Cause] = []
        undecided: list[str] = []
        for own in stages:
            before = len(self._ledger.mismatches)
            self._compare(own, due, found)
            if len(self._ledger.mismatches) > before:
                some = own_causes(
                    own, self._ledger, chain.orders[own.stage].numbers, found, self._named(own), self._exchange.rank
                )
                causes += some.cause
                undecided += some.undecided
        held = [one for _, module in self._own.modules.items() for one in module.parameters()]
        squares = {
            name: float(torch.linalg.vector_norm(one, dtype=torch.float64)) ** 2
            for name, one in due.items()
            if one is not None
        }
        links = {own.stage: tuple(own.links) for own in stages}
        return OwnPart(self._ledger, seen, links, squares, (), tuple(causes), tuple(undecided), precision_among(held))

    def _ending(self, numbers: Sequence[int]) -> Ending:
        if self._given is None:
            raise RecordError("the last stage is here, and its targets are not: pass microbatches on its rank, too")
        return Ending(self._by.loss_fn, self._divisor, [self._given[m][1] for m in numbers])

    def _named(self, own: OwnStage) -> dict[str, str]:
        """By the model's name of a parameter, the stage's."""
        return {self._own.rename(own.stage, name): name for name in own.gradients}

    def _due(self, stages: Sequence[OwnStage]) -> dict[str, Tensor | None]:
        """What gradients must be, by name: of a parameter that several stages hold, the sum of what each adds up."""
        found: dict[str, Tensor | None] = {}
        for own in stages:
            found |= {self._own.rename(own.stage, name): one for name, one in own.gradients.items()}
        return found

    def _compare(self, own: OwnStage, due: Mapping[str, Tensor | None], seen: Mapping[str, Any]) -> None:
        names = self._named(own)
        if any(link.strange for link in own.links):
            told = f"stage {own.stage} gives something else each time that it is run"
            self._ledger.leave_out("gradient", list(names), told)
            return
        allowed = _Allowed(own, names)
        expected = Due("train", (), (), gradients={name: due[name] for name in names})
        at = Comparison(expected, allowed, self._ledger)
        for name in [one for one in reversed(names) if one in seen]:
            at.gradient(name, seen[name], rank=self._exchange.rank, stage=own.stage)
        at.close()
        self._ledger.leave_out("gradient", [one for one in names if one not in seen], "not compared")

    def _finish(self) -> None:
        if not self._obstacle and self._absent is None and self._part_of_chain is None:
            self.refuse("gradients() was not called: call it between backward and clipping, on every rank")

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
        whole = Whole([part.own for part in parts], self._data, self._divisor, self._places, self._model_names, no_norm)
        return whole.verdict("a step of this job, link by link", rerun=rerun, seconds=seconds)

    def _clear(self) -> None:
        self._watcher.close()


@dataclass(frozen=True)
class _Allowed:
    """What rounding may do to a stage's gradients, measured where one is not as it was to the bit."""

    own: OwnStage
    names: Mapping[str, str]

    def gradient(self, name: str) -> Floor:
        return self.own.floors.gradient_by_microbatch(self.own.named(self.names[name]))

    def loss(self, microbatch: int) -> Floor:
        raise AssertionError("losses are compared where all ranks' are known")

    def total(self) -> Floor:
        raise AssertionError("losses are compared where all ranks' are known")

    def norm(self) -> Floor:
        raise AssertionError("the norm is compared where all ranks' gradients are known")

    def update(self, name: str) -> Floor:
        raise AssertionError("no update is compared")
