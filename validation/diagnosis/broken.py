"""What a rule says of a stage's gradient sums that are not what they should be."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Broken:
    """A sum that is not what it should be: the kind of cause, at which stage, by which action, whose."""

    kind: str
    stage: int
    microbatches: tuple[int, ...] = ()
    action: str | None = None
    parameters: tuple[str, ...] = ()  # empty: all of the stage's
    factor: float | None = None
    detail: str = ""
