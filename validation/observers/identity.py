"""What a tensor is in place of the one that should be there, and whose, as values."""

from dataclasses import dataclass

import torch

from validation.observers.recording import Point

# Types that a tensor may have gone through on its way, by the names that people use.
NARROWER = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Label:
    """Whose a tensor of the reference is. ``ago``: how many operations before the one in question."""

    point: Point
    ago: int = 0

    def text(self, at: Point) -> str:
        """Named as seen from ``at``: what is the same goes without saying."""
        words = [f"microbatch {self.point.microbatch}'s"]
        if self.point.where != at.where:
            words.append(self.point.where)
        if self.point.stage != at.stage:
            words.append(f"at stage {self.point.stage}")
        if self.ago:
            words.append("of the previous step" if self.ago == 1 else f"of {self.ago} operations earlier")
        return " ".join(words)


@dataclass(frozen=True)
class What:
    """What a tensor is in place of the expected one.

    kind: other, member (another of the same boundary), stale, partial, rounded, multiple, zero, not-finite,
    uninitialised, reordered, noisy, sum, shape, missing, unexpected or different. ``label`` says whose, where it is
    somebody's; ``factor`` of a multiple; ``which`` of several tensors it is, as the text has it.
    """

    kind: str
    text: str
    factor: float | None = None
    label: Label | None = None
    which: str = ""
