"""How a step divides: its losses by all microbatches or by a replica's own, or gradients at last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from pipeproof.foreign.composed import Composed
from pipeproof.foreign.own_links import Ending, OwnStage
from pipeproof.observers.calls import Call


@dataclass
class Way:
    """Runs stages again, and finds out by what the losses of a step were divided.

    ``whole`` is what the loss of all ``replicas`` is divided by, ``own`` what this one's is. ``scale``: what sums are
    divided by at last, where losses were divided by less.
    """

    by: Composed
    whole: float = 1.0
    own: float = 1.0
    replicas: int = 1
    scale: float = 1.0

    def run_again(
        self, stage: int, module: nn.Module, calls: Sequence[Call], targets: Sequence[Any] | None
    ) -> OwnStage:
        """A stage, run once more. ``targets``: those of its calls, if it is the last one."""
        if targets is None:
            return self._once_more(stage, module, calls, None)
        best, fitting = None, -1
        for divisor, scale in self._ways.items():
            own = self._once_more(stage, module, calls, Ending(self.by.loss_fn, divisor, targets))
            if not own.flowing:
                return own  # by zeros nobody tells; other ranks may know
            if own.fitting > fitting:
                best, fitting, self.scale = own, own.fitting, scale
            if fitting == own.flowing:
                break
        assert best is not None, "there is a way"
        return best

    @property
    def _ways(self) -> dict[float, float]:
        """What losses may be divided by, and then sums.

        Replicas may average gradients, or add them up; a runtime may divide them at last.
        """
        if self.by.accumulation.late:
            return {1.0: self.whole}
        ways = {self.own: float(self.replicas)}
        ways.setdefault(self.whole, 1.0)
        ways.setdefault(1.0, self.whole)
        return ways

    def divided(self, sums: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """``sums`` by what they are too large."""
        scale = self.scale
        return {name: one if one is None or scale == 1.0 else one / scale for name, one in sums.items()}

    def undivided(self, seen: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was ``seen``, as if it were not divided yet: of such are what causes are sought by."""
        scale = self.scale
        return {name: one * scale if isinstance(one, Tensor) and scale != 1.0 else one for name, one in seen.items()}

    def _once_more(self, stage: int, module: nn.Module, calls: Sequence[Call], ending: Ending | None) -> OwnStage:
        own = OwnStage(stage, module, calls, ending=ending, accumulation=self.by.accumulation)
        own.run()
        return own


def wanting(calls: Sequence[Call], more: Sequence[frozenset[int]]) -> list[Call]:
    """``calls``, each asked for a gradient of these inputs, too, when it is run again."""
    found = []
    for call, inputs in zip(calls, more, strict=True):
        again = call.again
        asked = again if again is None else replace(again, wanting=again.wanting | inputs)
        found.append(replace(call, again=asked) if inputs else call)
    return found
