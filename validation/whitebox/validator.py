"""Validate custom steps: run on ranks, run the reference, judge by externally visible laws."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Generator, Tensor, nn

from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.core.observe.digest import contents
from pipeproof.core.reason import reasons_of
from pipeproof.core.replicas import Replicas
from pipeproof.core.verdict import Crash, Verdict
from pipeproof.reference.accumulation import PLAIN
from pipeproof.whitebox.assemble import Assembled
from pipeproof.whitebox.expectation import Expectation
from pipeproof.whitebox.handed_back import HandBackError
from pipeproof.whitebox.matching import NamesError
from pipeproof.whitebox.operation_run import Course, OperationRun
from pipeproof.whitebox.rank import RankMade, RankOrder, Step, digests, run_step
from pipeproof.whitebox.reference_run import ReferenceRun, SecondModel
from pipeproof.whitebox.shared_stages import join_parts, with_late_weights
from pipeproof.whitebox.step_oracle import UPDATED
from pipeproof.whitebox.step_verdict import judge, random_reference, undecided_verdict
from pipeproof.whitebox.task import (
    MakesOptimizer,
    ReferenceRaised,
    Task,
    WhiteBoxError,
    name_of,
    repeated_parameters,
)
from pipeproof.worlds.kinds import REAL
from pipeproof.worlds.rank_report import NeedsMoreRanks, RankFailed, WorldError, of_failure
from pipeproof.worlds.timeout import seconds
from pipeproof.worlds.world import World, open_world

if TYPE_CHECKING:
    from pipeproof.whitebox.fuzzing import FuzzResult
    from pipeproof.whitebox.space import Campaign

_READ = tuple("loss_divisor loss_scale accumulation max_norm operations outputs routers names warmup".split())


@dataclass(frozen=True)
class WhiteBox:
    """Validates steps on the ranks of ``world``; ``timeout_s`` bounds each, in seconds (None: the world's bound).

    ``case``: the only case that each campaign runs, as in a replay line.
    """

    world: World
    timeout_s: float | None = None
    case: str = ""

    def validate(
        self,
        step: Step,
        *,
        reference: Callable[[], nn.Module] | Expectation,
        microbatches: Sequence[Any],
        ranks: int | Sequence[int] | Mapping[str, int],
        loss_fn: Callable[[Any, Tensor], Tensor] | None = None,
        optimizer: MakesOptimizer | None = None,
        contract: Contract = DEFAULTS,
        timeout_s: float | None = None,
        **words: Any,
    ) -> Verdict:
        """Validate ``step(model, microbatches)`` on all ranks against the reference.

        ``model`` is ``reference()`` in training mode: the step cuts it into stages, or ignores it. It returns its
        modules, losses and norm, as in ``StepResult``, before clipping or clearing gradients.

        reference: builds the whole model. Or a ``StageByStage``: each rank then reruns its own stages, which it must
        watch, and no device needs more; ``model`` then comes from its ``build=``, on the meta device, or is None.
        microbatches: pairs of inputs and target. ranks: a count; or a list with each
        rank's replica. With n replicas, replica r gets microbatches r, r + n, ..., and reports their losses. The
        reference sees all. Or a mesh, as axis sizes: ``{"pp": 2, "dp": 2, "tp": 2}``, with ranks numbered as by
        ``init_device_mesh``. Ranks along tp, sp and cp get the same microbatches; ranks along dp, fsdp and ep share
        them. loss_fn: maps output and target to a microbatch's loss. Without it the model receives the whole
        microbatch, and returns the loss. optimizer: builds the reference's optimizer for a model, or a pair with a
        scheduler, which steps once after each update. With it the step must update its parameters once, and leave their
        gradients; weights are then compared too. contract: the step's claims beyond the defaults, such as a loss
        divisor, several operations, or parameter names. timeout_s: time limit in seconds; a hang ends there. words:
        contract words may also be passed directly: ``loss_divisor=8`` means ``contract=Contract(loss_divisor=8)``.

        Raises ``WhiteBoxError``, ``ContractError`` and ``ReplicasError``, and ``NeedsMoreRanks`` if a launcher started
        fewer. All other errors appear in the verdict.
        """
        began, build = perf_counter(), reference.whole if isinstance(reference, Expectation) else reference
        task = Task(step, build, tuple(microbatches), loss_fn, optimizer, contract.with_words(words))
        if isinstance(reference, Expectation):
            task = reference.judge(task)
        else:
            task.contract.reads(_READ, "beside a whole model, which tells them")
        task.check()
        replicas = Replicas.along(ranks, task.counts[0])
        for count in task.counts:
            replicas.of_as_many(count).check()
        seconds(self.world.timeout_s if timeout_s is None else timeout_s)
        title = task.title(len(replicas.of)) + (f", {replicas.count} replicas" if replicas.count > 1 else "")
        blank = Verdict(title, "unknown", "none", ())
        try:
            bounded = self if timeout_s is None else replace(self, timeout_s=timeout_s)
            for _ in self.world.interleavings():
                verdict = bounded._validate(title, task, replicas)
                if verdict.outcome != "pass":
                    break
        except (WhiteBoxError, NeedsMoreRanks):
            raise
        except RankFailed as failure:
            verdict = of_failure(blank, failure)
            if isinstance(why := failure.cause, HandBackError | NamesError):
                verdict = undecided_verdict(title, f"rank {failure.culprit}: {why}", reasons_of(*why.args))
        except Exception as error:  # of the reference, of what the ranks handed back, or ours: never a pass
            explained = isinstance(error, ReferenceRaised | WorldError)  # their text says what is wrong
            cause = error.__cause__ if explained and isinstance(error.__cause__, Exception) else error
            verdict = blank.before_its_end(Crash.of(cause))
            verdict = replace(verdict, stopped="", headline=str(error)) if explained else verdict
        verdict = self.world.complete(verdict)
        return self.hand_out(replace(verdict, rerun=_rerun(self.world), seconds=perf_counter() - began))

    def fuzz(
        self,
        step: Step,
        *,
        reference: Callable[..., nn.Module] | Expectation,
        data: Callable[[int, int, Generator], Any],
        loss_fn: Callable[[Any, Tensor], Tensor] | None = None,
        optimizer: MakesOptimizer | None = None,
        contract: Contract | Callable[[Sequence[Any]], Contract] = DEFAULTS,
        campaign: "Campaign | None" = None,
        **words: Any,
    ) -> "FuzzResult":
        """What a campaign of drawn cases finds: each is judged as by ``validate``, and the first that fails shrinks.

        A case has ranks, a number of microbatches, rows of each, a split of the layers, and a seed. ``step(model,
        microbatches)`` is given by name what it takes of ``split=``, ``dtype=``, ``seed=`` and the options that are
        named. Where nothing fails, a planted fault shows that the campaign can.

        reference: as of ``validate``; it gets ``seed=``, if it takes that. data: makes a microbatch of its number, its
        number of rows, and a ``torch.Generator``. loss_fn: as of ``validate``. optimizer: as of ``validate``. contract:
        as of ``validate``, or a function of the microbatches. campaign: what is drawn, and how long. words: the
        campaign's words may also be passed directly: ``ranks=(2, 4)``.

        Raises ``WhiteBoxError`` for what cannot be, and what ``validate`` and ``data`` raise.
        """
        from pipeproof.whitebox.fuzzing import Subject, run_campaign  # with it comes what only campaigns need
        from pipeproof.whitebox.space import Campaign

        chosen = Campaign.of(campaign, words)
        chosen = replace(chosen, case=chosen.case or self.case)
        judge = partial(WhiteBox(self.world, self.timeout_s).validate, loss_fn=loss_fn, optimizer=optimizer)
        subject = Subject(step, reference, data, contract, judge, lambda one: _rerun(self.world, str(one)))
        result = run_campaign(subject, chosen, self.world)
        return replace(result, verdict=self.hand_out(result.verdict))

    def hand_out(self, verdict: Verdict) -> Verdict:
        """Return ``verdict``; pytest's fixture tracks its readers."""
        return verdict

    def _validate(self, title: str, task: Task, replicas: Replicas) -> Verdict:
        """Judge ``task``. Raises ``RankFailed``."""
        ranks, bound_s, device = len(replicas.of), self.timeout_s, self.world.device
        contract = replace(task.contract, outputs=None)  # ranks need no outputs=
        order = RankOrder(task.step, task.reference, task.microbatches, contract, name_of(task.step), {}, replicas)
        if isinstance(task.by, Expectation):
            longest = self.world.timeout_s if bound_s is None else bound_s
            judged = self.world.run(task.by.check_on_rank, order, longest, ranks=ranks, timeout_s=bound_s)[0]
            laws = tuple(law for law in judged.laws if law.name not in UPDATED)  # the optimizer is not known
            return replace(judged, config=title, laws=laws)
        first = task.operation(0)
        model = first.build(device)
        task.check_routers(model)
        known, updates = contents(model), task.optimizer is not None or bool(task.contract.operations)
        order = replace(order, known=known, updates=updates)
        second, ahead = SecondModel(first, device, model), ReferenceRun(first, model, replicas)
        failure, rows = None, []
        try:
            rows = self.world.run(run_step, order, ranks=ranks, timeout_s=bound_s, meanwhile=chain(second, ahead))
        except RankFailed as error:
            failure = error
        if second.other_weights:
            return random_reference(title, task, second.other_weights)
        if failure is not None:
            raise failure
        made = [list(operation) for operation in zip(*rows, strict=True)]
        for operation in made:  # attach senders to received messages
            sent = {message: what for one in operation for message, what in one.sent.items()}
            for call in (call for one in operation for part in one.parts for call in part.calls or ()):
                call.came = {tensor: came.join(sent) for tensor, came in call.came.items()}
        shared = [replicas.of_as_many(count) for count in task.counts]
        joined = with_late_weights([join_parts(one, by, known) for one, by in zip(made, shared, strict=True)])
        found = Assembled(
            model,
            known,
            joined[0],
            replicas,
            lambda: repeated_parameters(first.build(device), ahead.batches[0], first.loss.function),
            name=task.contract.plan[0],
        )
        if found.other_build:
            why = f"{found.other_build}: seed it, and let it depend on nothing that ranks differ in"
            return undecided_verdict(title, f"the reference {task.name} is not the same everywhere: {why}")
        if other := other_data(made[0], digests(task.microbatches)):
            return undecided_verdict(title, other)
        run = ahead.settle(found.owner, watched=found.watched)
        adds = next((one.accumulation for one in made[0] if one.accumulation is not None), None)
        adds = PLAIN if adds is None else replace(adds, shares=replicas.each)  # as ranks declare it
        course = Course(title, task, second, (OperationRun(first, found, run, adds),)).through(joined)
        verdict = judge(course)
        if course.raised is not None and verdict.outcome == "pass":
            raise course.raised
        return verdict


def other_data(made: Sequence[RankMade], own: tuple[tuple[bytes, ...], ...]) -> str:
    """Describe the first rank with other microbatches than the reference; empty if equal."""
    for rank, one in enumerate(made):
        for number, (theirs, ours) in enumerate(zip_longest(one.given, own)):
            if theirs != ours:
                return (
                    f"rank {rank} was given another microbatch {number} than the reference: every rank of torchrun "
                    "makes its own, so seed them alike"
                )
    return ""


def _rerun(world: World, case: str = "") -> str:
    """Return the command to repeat this run; a simulated run's decision and a campaign's ``case`` come along."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test:
        options = f"{world.decision.pytest_options if world.decision else ''} {world.seed_option}".strip()
        own = f"--pipeproof-case={shlex.quote(case)}" if case else ""
        return " ".join(filter(None, [f'pytest "{test}"', options, own]))
    notes = [str(world.decision)] if world.decision else []
    notes += [f"with case={case!r}"] if case else []
    return "  # ".join([shlex.join(["python", *sys.argv]), *([", ".join(notes)] if notes else [])])


def validate(step: Step, *, world: str = REAL, **given: Any) -> Verdict:
    """As ``WhiteBox.validate``, with its arguments, in a world opened for this call.

    ``world``: ``real``, or ``simulated``, which finds races and hangs that real ranks show once in a thousand runs: one
    interleaving, with gloo's rules. For others, or all, pass your own ``SimulatedWorld`` to ``WhiteBox``.
    """
    with open_world(world) as place:
        return WhiteBox(place).validate(step, **given)


def fuzz(step: Step, *, world: str | World = REAL, **given: Any) -> "FuzzResult":
    """As ``WhiteBox.fuzz``, with its arguments, on a world that lasts as long as this call.

    ``world``: ``real``, or ``simulated``: who is next and when messages move is then drawn with each case. Or a
    ``SimulatedWorld`` of one's own, with the seed of a replay line, say.
    """
    with open_world(world) if isinstance(world, str) else nullcontext(world) as place:
        return WhiteBox(place).fuzz(step, **given)
