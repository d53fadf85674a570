"""How a step divides, as its contract says: losses by all microbatches or a replica's own, or gradients at last."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.reason import Reason
from pipeproof.foreign.crossings import near
from pipeproof.foreign.loss_of_all import LossOfAll
from pipeproof.observers.calls import Call
from pipeproof.records.record import RecordError
from pipeproof.records.step_record import Pairs
from pipeproof.reference.model import LossFn
from pipeproof.wings.composed.chain import Chain
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.links import Ending
from pipeproof.wings.composed.own_links import OwnStage

_WHOLE = 1e-5  # how far, relative to its size, a factor may be from the whole number that it is taken for
_MULTIPLE = 1e-3  # how far from 1 a factor is that somebody multiplied by
_SPEAKS = (
    "stage {} speaks to other ranks when it is run, so that it is run but once, and what flowed to its outputs is not "
    "what the loss gives that is divided by the number of its replica's microbatches: pass loss_divisor"
)


@dataclass
class Way:
    """Runs stages again, divided and scaled as the contract says; ranks tell each other what flows instead.

    ``scaled``: what losses are multiplied by, and gradients divided by before they are looked at. ``own``: what the
    loss of each of the ``replicas`` is divided by, where these average. ``alike``: it is the same in all. ``added``:
    replicas divide losses by as much more instead, and add up: the sums are the same. ``factors``: what flows to a last
    stage here, in multiples of what is due; None: in various. ``sums``: the type in which the gradients of a stage are
    added up, where its weights are narrower. ``in_parts``: stages are cut inside.
    """

    by: AgainstItself
    scaled: float = 1.0
    own: float = 1.0
    replicas: int = 1
    alike: bool = True
    added: bool = False
    factors: list[float | None] = field(default_factory=list)
    sums: Mapping[int, torch.dtype] = field(default_factory=dict)
    in_parts: bool = False
    _ran: float | None = None  # what the last stage was run by, where anything flows

    def run_again(
        self, stage: int, module: nn.Module, calls: Sequence[Call], targets: Sequence[Any] | None
    ) -> OwnStage:
        """A stage, run once more. ``targets``: those of its calls, if it is the last one."""
        own = self._once_more(stage, module, calls, targets)
        if targets is None or not own.flowing:
            return own  # by zeros nobody tells; other ranks may know
        self._ran = self.divisor
        if own.speaks and own.fitting < own.flowing:
            own.doubt(Reason.LOSS_SCALE.doubt(_SPEAKS.format(stage)))
        self.factors = [own.factor if _is_off(own) else 1.0]
        return own

    def agree(self, factors: Sequence[float | None], scaled: Sequence[float]) -> float | None:
        """Take what a last stage's rank ``scaled`` by, and what all tell. Gives by what losses are too large."""
        self.scaled = next(iter(scaled), self.scaled)
        times = agreed_times(factors)
        both = self.alike and self.replicas > 1 and not self.by.accumulation.late
        self.added = both and times is not None and abs(times * self.replicas - 1.0) <= _MULTIPLE
        return None if self.added else times

    def as_agreed(
        self, own: OwnStage, module: nn.Module, calls: Sequence[Call], targets: Sequence[Any] | None
    ) -> OwnStage:
        """``own``, or what it is in the way that ranks agreed upon, if that is not the one it was run in."""
        if targets is None or self._ran in (None, self.divisor):
            return own
        if own.speaks:
            own.doubt(Reason.LOSS_SCALE.doubt(_SPEAKS.format(own.stage)))
            return own
        return self._once_more(own.stage, module, calls, targets)

    @property
    def _loss_fn(self) -> LossFn | None:
        assert not isinstance(self.by.loss_fn, LossOfAll), "it was made of all microbatches when the step began"
        return self.by.loss_fn

    @property
    def divisor(self) -> float:
        """What losses are divided by before their backwards."""
        if self.by.accumulation.late:
            return 1.0 / self.scaled
        return (self.whole if self.added else self.own) / self.scaled

    @property
    def scale(self) -> float:
        """What sums are divided by at last, where losses were divided by less."""
        if self.by.accumulation.late:
            return self.whole * self.scaled
        return self.scaled if self.added else self.replicas * self.scaled

    @property
    def whole(self) -> float:
        """What the loss of all replicas together is divided by."""
        return self.own * self.replicas

    def divided(self, sums: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """``sums`` by what they are too large."""
        scale = self.scale
        return {name: one if one is None or scale == 1.0 else one / scale for name, one in sums.items()}

    def undivided(self, seen: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was ``seen``, as if it were not divided yet: of such are what causes are sought by."""
        scale = self.scale
        return {name: one * scale if isinstance(one, Tensor) and scale != 1.0 else one for name, one in seen.items()}

    def _once_more(
        self, stage: int, module: nn.Module, calls: Sequence[Call], targets: Sequence[Any] | None
    ) -> OwnStage:
        accumulation = replace(self.by.accumulation, bundles={})  # those go by microbatches, and not by calls
        if accumulation.dtype is None and stage in self.sums:
            accumulation = replace(accumulation, dtype=self.sums[stage])
        ending = None if targets is None else Ending(self._loss_fn, self.divisor, targets)
        own = OwnStage(stage, module, calls, ending=ending, accumulation=accumulation, in_parts=self.in_parts)
        own.run()
        return own


def agreed_times(factors: Sequence[float | None]) -> float | None:
    """What losses are multiplied by, of the ``factors`` at all last stages; None where not, or not all alike."""
    first = factors[0] if factors else None
    if first is None or first == 1.0 or not all(near(one, first) for one in factors):
        return None
    for plain in (round(first), 1 / (round(1 / first) or math.inf)):
        if plain and abs(first - plain) <= _WHOLE * abs(first):
            return float(plain)
    return first


def _is_off(own: OwnStage) -> bool:
    """Whether what flowed to its outputs is not what flows again, by more than its types round multiples."""
    coarse = own.narrowest is not None and torch.finfo(own.narrowest).eps > torch.finfo(torch.float32).eps
    return own.fitting < own.flowing or (not coarse and abs((own.factor or 1.0) - 1.0) > _MULTIPLE)


def targets_of(given: Pairs | None, chain: Chain, stage: int) -> list[Any] | None:
    """The target of each call of the last stage; None for others. Raises ``RecordError`` if they are not here."""
    if stage < chain.last:
        return None
    if given is None:
        raise RecordError("the last stage is here, and its targets are not: pass microbatches on its rank, too")
    return [given[m][1] if m >= 0 else None for m in chain.orders[stage].numbers]


def wanting(calls: Sequence[Call], more: Sequence[frozenset[int]]) -> list[Call]:
    """``calls``, each asked for a gradient of these inputs, too, when it is run again."""
    found = []
    for call, inputs in zip(calls, more, strict=True):
        again = call.again
        asked = again if again is None else replace(again, wanting=again.wanting | inputs)
        found.append(replace(call, again=asked) if inputs else call)
    return found
