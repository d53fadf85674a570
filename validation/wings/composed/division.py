"""How a step divides, as its contract says: losses by the number of microbatches, or gradients at last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pipeproof.core.ledger import Ledger
from pipeproof.core.reason import Reason
from pipeproof.foreign.crossings import near
from pipeproof.reference.accumulation import Accumulation

_TIMES = "all losses are {:g} times the contract's: if that is meant, loss_scale={:g}"
_OR_ELSE = ", or loss_divisor={:g} where gradients are not divided by it"
_NO_SCALE = "all losses are {:g} times the contract's, which no contract says: let loss_fn give what is trained"
_UNEQUAL = (
    "replicas have unequal numbers of microbatches, and losses are not divided by these and averaged: say "
    "loss_divisor={:g}, or what it is"
)


@dataclass(frozen=True)
class Division:
    """What is divided by what.

    ``scaled``: what losses are multiplied by, and gradients divided by before they are looked at. ``own``: what the
    losses of each of the ``replicas`` are divided by, which then average. ``alike``: that is the same in all of them.
    ``declared``: the contract says how losses are scaled. ``came``: what came back from losses, in multiples of what is
    due. ``undeclared``: something else came back than is due, and replicas have unequal numbers of microbatches.
    """

    accumulation: Accumulation
    scaled: float = 1.0
    own: float = 1.0
    replicas: int = 1
    alike: bool = True
    declared: bool = False
    came: float = 1.0
    undeclared: bool = False

    def with_factors(self, factors: Sequence[float | None]) -> "Division":
        """The same, where ``factors`` came back to last stages: None where its microbatches have several."""
        first = factors[0] if factors else None
        came = 1.0 if first is None or not all(near(one, first) for one in factors) else first
        return replace(self, came=came, undeclared=not self.alike and any(one != 1.0 for one in factors))

    @property
    def divisor(self) -> float:
        """What losses are divided by before their backwards."""
        return (1.0 if self.accumulation.late else self.own) / self.scaled

    @property
    def whole(self) -> float:
        """What the loss of all replicas together is divided by."""
        return self.own * self.replicas

    @property
    def scale(self) -> float:
        """What the sums over all replicas are divided by."""
        return (self.whole if self.accumulation.late else self.replicas) * self.scaled * self.times

    @property
    def times(self) -> float:
        """What sums are too large by that no contract says: they are still to be the contract's.

        So gradients tell whether that was made good. Where the contract says how losses are scaled, that is wrong where
        it came back, and gradients are what follows from it.
        """
        return self.came if self.adds_up or not self.declared else 1.0

    @property
    def adds_up(self) -> bool:
        """Whether replicas divide losses by their number, too, and add gradients up: these are the same."""
        return self.alike and self.replicas > 1 and not self.accumulation.late and self.came == 1 / self.replicas

    def doubt(self, ledger: Ledger, microbatches: int) -> str:
        """Enter what losses are multiplied by that no contract says. Gives why nothing is known of gradients, if so."""
        if self.undeclared:
            return Reason.LOSS_SCALE.doubt(_UNEQUAL.format(microbatches))
        if self.came == 1.0 or self.adds_up:
            return ""
        scale = self.scaled * self.came
        told = (_TIMES if scale > 0 else _NO_SCALE).format(self.came, scale)
        if self.declared:
            ledger.remark("boundaries", told)
        else:
            more = scale > 0 and not self.accumulation.late
            ledger.doubt("boundaries", told + more * _OR_ELSE.format(self.whole / self.came), Reason.LOSS_SCALE)
        return ""

    def divided(self, sums: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """``sums`` by what they are too large."""
        scale = self.scale
        return {name: one if one is None or scale == 1.0 else one / scale for name, one in sums.items()}

    def undivided(self, seen: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was ``seen``, as if it were not divided yet: of such are what causes are sought by."""
        scale = self.scale
        return {name: one * scale if isinstance(one, Tensor) and scale != 1.0 else one for name, one in seen.items()}


def round_factor(factor: float, within: float) -> float:
    """The whole number, or the part of one, that ``factor`` is, if it is as near ``within`` rounding; else itself."""
    for one in (round(factor), 1 / (round(1 / factor) or float("inf"))):
        if one and abs(factor - one) <= within * abs(factor):
            return float(one)
    return factor
