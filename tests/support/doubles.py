"""A double of each extension point: as little as one can be, and all that one must be."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self
from unittest import mock

import torch.distributed as dist
from torch import nn

from pipeproof.core.cause import Cause
from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.core.judge import conclude
from pipeproof.core.ledger import Ledger
from pipeproof.core.mismatch import Mismatch
from pipeproof.core.observe.wrappers import AroundGradients
from pipeproof.core.tolerance import Floor
from pipeproof.core.verdict import Verdict
from pipeproof.explain.rule import Rule
from pipeproof.own.faults import Change, SpecimenError
from pipeproof.pipeline.step import Parts
from pipeproof.reference.model import LossFn
from pipeproof.whitebox.expectation import Expectation
from pipeproof.whitebox.rank import RankOrder
from pipeproof.wings.primitives.part import RankPart
from pipeproof.wings.primitives.primitive import Level, Primitive
from pipeproof.worlds.settings import Settings
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World


class InThisProcess(World):
    """A world of one rank, which is this process: what a job sets for it, its environment too, is put back."""

    def run(
        self,
        job: Callable[..., Any],
        *args: object,
        ranks: int,
        timeout_s: float | None = None,
        meanwhile: Iterable[object] = (),
    ) -> list[Any]:
        assert ranks == 1, "there is one"
        settings = Settings()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with mock.patch.dict(os.environ):
                return [job(RankContext(0, 1, "cpu", dist.group.WORLD), *args)]
        finally:
            dist.destroy_process_group()
            settings.put_back()


class Tripled(AroundGradients):
    def reduce_tied(self) -> None:
        self.inner.reduce_tied()
        for stage in self.stages:
            for parameter in stage.module.parameters():
                assert parameter.grad is not None
                parameter.grad *= 3


class OneFault:
    """Faults of which there is one: gradients are three times what they should be."""

    files = ()
    names = ("tripled",)

    def load(self, path: str, /) -> object:
        raise SpecimenError(f"{path}: nothing is read")

    def find(self, name: str, /) -> Change | None:
        def plant(parts: Parts) -> Parts:
            return replace(parts, gradients=Tripled(parts.gradients, parts.stages))

        return Change(name=name, plant=plant) if name in self.names else None


@dataclass(frozen=True)
class KnownLosses(Expectation):
    """A step whose losses are known from elsewhere; nothing else is held against anything."""

    losses: tuple[float, ...]
    contract: Contract = DEFAULTS

    def check_on_rank(self, context: RankContext, order: RankOrder, bound_s: float) -> Verdict:
        ledger = Ledger(("loss",))
        _, observed = order.step(None, order.microbatches)  # type: ignore[misc]  # modules and losses
        for m, (one, expected) in enumerate(zip(observed, self.losses, strict=True)):
            place = Mismatch("loss", 1, rank=context.rank, microbatch=m)
            ledger.numbers(place, one, expected, lambda: Floor(0.0, 0.0, 1.0))
        return conclude(ledger, "a step of known losses")

    def of_a_step(self, loss_fn: LossFn | None, contract: Contract) -> Self:
        return self

    def whole(self) -> nn.Module | None:
        return None


NOTED = Primitive(
    "noted",
    "calls are counted",
    ("ddp",),
    Level.AROUND,
    saves=("0", "nothing"),
    costs=("0", "nothing"),
    implementation="a forward hook",
    source="none",
)


def noted(calls: list[int]) -> RankPart:
    """A primitive that appends to ``calls`` whenever its stage is called."""

    def apply(stage: nn.Module, mesh: object) -> nn.Module:
        stage.register_forward_pre_hook(lambda *_: calls.append(1))
        return stage

    return RankPart(apply)


ALWAYS_THE_LOSS = Rule(lambda evidence: [Cause("report", detail="whatever it is, a loss is wrong")])
