"""How a step divides, as its contract says: losses by all microbatches or a replica's own, or gradients at last."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.reason import Reason
from pipeproof.foreign.chain import Chain
from pipeproof.foreign.composed import AgainstItself
from pipeproof.foreign.crossings import near
from pipeproof.foreign.links import Ending
from pipeproof.foreign.loss_of_all import LossOfAll
from pipeproof.foreign.own_links import OwnStage
from pipeproof.observers.calls import Call
from pipeproof.records.record import RecordError
from pipeproof.records.step_record import Pairs
from pipeproof.reference.model import LossFn

_WHOLE = 1e-5  # how far, relative to its size, a factor may be from the whole number that it is taken for
_MULTIPLE = 1e-3  # how far from 1 a factor is that somebody multiplied by
_SPEAKS = (
    "stage {} speaks to other ranks when it is run, so that it is run but once, and what flowed to its outputs is not "
    "what the loss gives that is divided by the number of its replica's microbatches: pass loss_divisor"
)


@dataclass
class Way:
    """Runs stages again. Replicas average gradients, or divide losses by as much more: all do alike, which flows tell.

    ``scaled``: what losses are multiplied by, and gradients divided by before they are looked at. ``own``: what the
    loss of each of the ``replicas`` is divided by, where these average. ``alike``: it is the same in all. ``fitting``:
    the names of ways that fit what flows here, which ranks tell each other. ``name``: the one that they agreed upon.
    ``factors``: what flows to a last stage here, in multiples of what is due; None: in various. ``sums``: the type in
    which the gradients of a stage are added up, where its weights are narrower. ``in_parts``: stages are cut inside.
    """

    by: AgainstItself
    scaled: float = 1.0
    own: float = 1.0
    replicas: int = 1
    alike: bool = True
    name: str = ""
    fitting: frozenset[str] = frozenset()
    factors: list[float | None] = field(default_factory=list)
    sums: Mapping[int, torch.dtype] = field(default_factory=dict)
    in_parts: bool = False
    _divisor: float | None = None  # by which the last stage was run, where anything flows

    def run_again(
        self, stage: int, module: nn.Module, calls: Sequence[Call], targets: Sequence[Any] | None
    ) -> OwnStage:
        """A stage, run once more. ``targets``: those of its calls, if it is the last one."""
        if targets is None:
            return self._once_more(stage, module, calls, None)
        best, most = None, -1
        for divisor in dict.fromkeys(by for by, _ in self._ways.values()):
            own = self._once_more(stage, module, calls, Ending(self._loss_fn, divisor, targets))
            if not own.flowing:
                return own  # by zeros nobody tells; other ranks may know
            if own.fitting > most:
                best, most, self._divisor = own, own.fitting, divisor
            if own.speaks and own.fitting < own.flowing:
                own.doubt(Reason.LOSS_SCALE.doubt(_SPEAKS.format(stage)))
            if own.speaks or most == own.flowing:
                break
        assert best is not None, "there is a way"
        self.factors = [best.factor if _is_off(best) else 1.0]
        self.fitting = frozenset(name for name, (by, _) in self._ways.items() if most and by == self._divisor)
        return best

    def agree(self, fitting: Sequence[frozenset[str]], scaled: Sequence[float]) -> None:
        """Take the way that fits on most ranks, of those that can tell; and what a last stage's rank ``scaled`` by."""
        self.scaled = next(iter(scaled), self.scaled)
        self.name = max(self._ways, key=lambda name: sum(name in those for those in fitting))

    def as_agreed(
        self, own: OwnStage, module: nn.Module, calls: Sequence[Call], targets: Sequence[Any] | None
    ) -> OwnStage:
        """``own``, or what it is in the way that ranks agreed upon, if that is not the one it was run in."""
        divisor = self._ways[self.name][0]
        if targets is None or self._divisor in (None, divisor):
            return own
        if own.speaks:
            own.doubt(Reason.LOSS_SCALE.doubt(_SPEAKS.format(own.stage)))
            return own
        return self._once_more(own.stage, module, calls, Ending(self._loss_fn, divisor, targets))

    @property
    def _loss_fn(self) -> LossFn | None:
        assert not isinstance(self.by.loss_fn, LossOfAll), "it was made of all microbatches when the step began"
        return self.by.loss_fn

    @property
    def scale(self) -> float:
        """What sums are divided by at last, where losses were divided by less."""
        return self._ways[self.name or next(iter(self._ways))][1]

    @property
    def _ways(self) -> dict[str, tuple[float, float]]:
        """What losses may be divided by, and then sums. The sums are the same."""
        every, scaled = float(self.replicas), self.scaled
        if self.by.accumulation.late:
            return {"late": (1.0 / scaled, self.whole * scaled)}
        found = {"averaged": (self.own / scaled, every * scaled)}
        return found | ({"added": (self.whole / scaled, scaled)} if self.alike else {})

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

    def _once_more(self, stage: int, module: nn.Module, calls: Sequence[Call], ending: Ending | None) -> OwnStage:
        accumulation = replace(self.by.accumulation, bundles={})  # those go by microbatches, and not by calls
        if accumulation.dtype is None and stage in self.sums:
            accumulation = replace(accumulation, dtype=self.sums[stage])
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
