"""Where a rank's step went: compute, communication and idle time, measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """Seconds of one step on one rank.

    compute: inside the stages' forward and backward. idle: waiting for a message that had not come. communication:
    issuing sends and receives, packing, and waiting at the end for sends to be taken. What is left of ``step_s`` is
    the runtime's own time and, after the last backward, the reductions and the optimizer.
    """

    rank: int
    step_s: float
    compute_s: float
    communication_s: float
    idle_s: float

    @property
    def other_s(self) -> float:
        return self.step_s - self.compute_s - self.communication_s - self.idle_s
