"""Where a rank's step went: compute, communication and idle time, measured."""

from collections.abc import Sequence
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


def profile_table(profiles: Sequence[Profile]) -> str:
    """A line per rank: milliseconds, and the share of the step."""
    head = f"{'rank':>4}  {'step':>10}  {'compute':>17}  {'communication':>17}  {'idle':>17}  {'other':>17}"
    return "\n".join([head, *map(_row, profiles)])


def beside(measured: Sequence[Profile], simulated: Sequence[Profile]) -> str:
    """Two lines per rank: where the time went, and where the simulator has it go."""
    head = f"{'rank':>4}  {'':9}  {'makespan':>10}  {'compute':>17}  {'communication':>17}  {'idle':>17}"
    lines = [head]
    for pair in zip(measured, simulated, strict=True):
        for profile, label, name in zip(pair, (str(pair[0].rank), ""), ("measured", "simulated"), strict=True):
            parts = (profile.compute_s, profile.communication_s, profile.idle_s)
            cells = "  ".join(f"{_cell(part, profile.step_s):>17}" for part in parts)
            lines.append(f"{label:>4}  {name:9}  {profile.step_s * 1e3:>7.1f} ms  {cells}")
    return "\n".join(lines)


def _row(profile: Profile) -> str:
    parts = (profile.compute_s, profile.communication_s, profile.idle_s, profile.other_s)
    cells = "  ".join(f"{_cell(part, profile.step_s):>17}" for part in parts)
    return f"{profile.rank:>4}  {profile.step_s * 1e3:>7.1f} ms  {cells}"


def _cell(seconds: float, whole: float) -> str:
    share = seconds / whole if whole else 0.0
    return f"{seconds * 1e3:>7.1f} ms {share:>6.1%}"
