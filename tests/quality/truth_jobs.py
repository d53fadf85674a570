"""Running jobs of the functional and of the asynchronous pipeline: steps inside ``check_step``, right and wrong."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import runtime_async
import runtime_async_training
import runtime_functional
import runtime_functional_training
import torch
import torch.distributed as dist
from runtime_functional_training import Cut, Ranks, chunks_of
from torch import nn
from truth_async import old_casts, recomputed
from truth_check import RIGHT, Counts, Truth
from truth_faults import PAIRED, backward, forward, sums
from truth_models import Pairs, data_of, some
from truth_trial import COUNT, MODELS, loss_of_rows

from pipeproof import Contract, SingleDevice, StageByStage, check_step, record_step
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.worlds.worker import RankContext


@dataclass(frozen=True)
class Job:
    """A job and its truth. ``against``: "single", "composed" or "record". ``rate``: of its updates between steps."""

    name: str
    way: Any
    against: str
    truth: Truth = RIGHT
    model: str = "plain"
    data: Pairs | None = None
    steps: int = 1
    rate: float = 0.1
    divisor: float | None = None

    ways = (True,)

    @property
    def title(self) -> str:
        runtime = "async" if isinstance(self.way, runtime_async.Way) else "functional"
        return f"job, {runtime}: {self.name}, {self.against}"

    @property
    def ranks(self) -> int:
        return 3 if self.way.replicas == 1 else 4

    @property
    def counts(self) -> Counts:
        """How many there are of each."""
        return Counts(self.ranks, self.ranks // self.way.replicas, len(self.microbatches(0)), self.way.replicas)

    def verdict(self, whitebox: WhiteBox, *, watched: bool) -> Verdict:
        """What is said of its first step that is no pass, or of its last."""
        found = whitebox.world.run(run_job, self, ranks=self.ranks, timeout_s=60.0)[0]
        return next((one for one in found if one.outcome != "pass"), found[-1])

    def microbatches(self, number: int) -> Pairs:
        return data_of(count=COUNT * self.steps)[number * COUNT :][:COUNT] if self.data is None else self.data

    def expected(self, build: Callable[[], nn.Module], pairs: Pairs) -> Any:
        contract = Contract(loss_divisor=self.divisor)
        if self.against == "single":
            return SingleDevice(build, loss_of_rows, contract)
        if self.against == "record":
            return record_step(build(), pairs, loss_fn=loss_of_rows, contract=contract)
        return StageByStage(loss_of_rows, contract=contract, build=build)


def run_job(context: RankContext, job: Job) -> list[Verdict]:
    """One rank of the job; the verdicts on its steps."""
    training = runtime_async_training if isinstance(job.way, runtime_async.Way) else runtime_functional_training
    build, ranks, found = MODELS[job.model], Ranks(job.way.replicas), list[Verdict]()
    cut = Cut(chunks_of(build(), 1, ranks))
    replica = ranks.replicas.index(dist.get_rank())
    pairs = [job.microbatches(k)[replica :: job.way.replicas] for k in range(job.steps)]
    run = training.course(cut, (("train", one) for one in pairs), way=job.way, watched=False)
    for number, own in enumerate(pairs):
        against = job.expected(build, job.microbatches(number))
        with check_step({ranks.place: cut[0]}, own, against=against, timeout_s=30) as check:
            handed = next(run)
            check.gradients(handed.gradients)
            check.report(losses=handed.losses, norm=handed.grad_norm)
        found.append(check.verdict)
        with torch.no_grad():
            for name, parameter in cut[0].named_parameters() if job.rate and number + 1 < job.steps else ():
                if parameter.requires_grad:
                    parameter -= job.rate * handed.gradients[name]
    return found


def rights() -> Iterator[Job]:
    """Every job without a fault."""
    pure, late = runtime_functional.Way, runtime_async.Way
    for against in ("single", "composed", "record"):
        yield Job("right", pure(), against)
        yield Job("right, vjp", pure(by="vjp"), against)
        yield Job("right, greedy thread", late(greedy=True, receive="thread"), against)
        yield Job("right, padding in the middle", late(pads=(3,)), against)
    for against in ("single", "composed"):
        yield Job("right, again", pure(by="again"), against)
        yield Job("right, recomputed on a worker", late(call=recomputed, worker=True), against)
        yield Job("right, main gradients of the module", late(main="module"), against, steps=3)
        yield Job("right, two halves of rows", late(halves=True), against)
        yield Job("right, replicas", late(replicas=2, reduce="hooks"), against)
        yield Job("right, replicas, flat", pure(replicas=2, handed="flat"), against)
        filled = late(replicas=2, fill=4, divisor=7.0)
        yield Job("right, one replica filled up", filled, against, data=data_of(count=7), divisor=7.0)
        yield Job("right, rows filled up", pure(rows=6), against, data=some(4, 6, 3, 5, 6, 2))
        yield Job("right, autocast", late(), against, model="autocast", steps=2)


def faults() -> Iterator[Job]:
    """Every job with a fault."""
    pure, late = partial(runtime_functional.Way, at=(1,)), partial(runtime_async.Way, at=(1,))
    stale = sums("stale-gradient", 1, wrong="stale")
    dropped = sums("dropped", 1, microbatches=(COUNT - 1,))
    for against in ("single", "composed"):
        leaves = late(fault="main gradients not cleared", main="module")
        yield Job("main gradients not cleared", leaves, against, stale, steps=2)
        yield Job("sums of the step before", pure(fault="sums of the step before"), against, stale, steps=2, rate=0.0)
        yield Job("last not added", pure(fault="last not added"), against, dropped)
        yield Job("last not added, vjp", pure(fault="last not added", by="vjp"), against, dropped)
        turned = backward(PAIRED, 0, 1, wrong="swapped")
        yield Job("newest pullback", pure(fault="newest pullback"), against, turned)
        halved = backward("scale", 0, 1, wrong="scale", factors=(0.5,), affected=(0,))
        yield Job("gradients halved on their way", late(fault="gradients halved on their way"), against, halved)
        apart = sums("not-reduced", 1, ranks=(2, 3), wrong="reduction replicas")
        yield Job("never reduced", late(fault="never reduced", at=(2, 3), replicas=2), against, apart)
    old = forward("stale-tensor", 0, 1, 2, wrong="stale computation", somewhere=True)
    others = replace(old, kinds=(*old.kinds, "computation"))
    yield Job("weights of the first step", pure(), "single", old, steps=2)
    yield Job("weights of the first step", pure(), "composed", others, steps=2)
    casts = late(before=old_casts)
    yield Job("old casts of weights", casts, "single", old, model="autocast", steps=2)
    little = sums("stale-tensor", 0, 1, 2, wrong="stale computation", somewhere=True, faint=True)
    yield Job("old casts of weights, small steps", casts, "single", little, model="autocast", steps=2, rate=0.005)


def jobs() -> Iterator[Job]:
    """Every job."""
    yield from rights()
    yield from faults()
