"""What rounding may do where nobody measured it."""

from dataclasses import dataclass, field, replace

from pipeproof.core.limits import Precision
from pipeproof.core.tolerance import Floor, unmeasured

_OTHER_UPDATE = 0.02  # the least fault of an update whose gradient is right, relative to it: half of it must be seen


@dataclass(frozen=True)
class Unmeasured:
    """What rounding may do to what was computed once more by the very same operations; ``apart``: to losses it did."""

    precision: Precision
    apart: float = field(default=0.0, kw_only=True)

    def loss(self, microbatch: int) -> Floor:
        return replace(unmeasured(self.precision), rounding=self.apart)

    def total(self) -> Floor:
        return self.loss(0)

    def norm(self) -> Floor:
        return unmeasured(self.precision)

    def gradient(self, name: str) -> Floor:
        return unmeasured(self.precision)

    def update(self, name: str) -> Floor:
        return replace(unmeasured(self.precision), fault=_OTHER_UPDATE)
