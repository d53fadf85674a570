"""Verdicts on steps of a training job, for those who watch dashboards: TensorBoard, or Weights & Biases."""

import math
from typing import Any

from pipeproof.core.verdict import Verdict

_OUTCOMES = {"pass": 1.0, "unknown": 0.5, "fail": 0.0}


class WriterError(ValueError):
    """What verdicts cannot be logged to."""


def log_verdict(verdict: Verdict, step: int, writer: Any) -> None:
    """Log a verdict at a ``step`` of training: one call after each checked step.

    Four values: ``pipeproof/outcome`` (1 pass, 0.5 unknown, 0 fail), ``pipeproof/worst`` (the largest relative error),
    ``pipeproof/over_rounding`` (the largest error as a multiple of what rounding does, where it was measured) and
    ``pipeproof/tier`` in words; of what is no pass, its text too.

    writer: a ``torch.utils.tensorboard.SummaryWriter``, or a run of ``wandb``, or None, as ranks have that log nothing;
    whatever has ``add_scalar`` and ``add_text``, or ``log``. Raises ``WriterError`` for anything else.
    """
    if writer is None:
        return
    numbers = {"outcome": _OUTCOMES[verdict.outcome], "worst": verdict.worst, "over_rounding": verdict.over_rounding}
    numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}  # dashboards draw no infinity
    texts = {"tier": verdict.tier} | ({} if verdict else {"verdict": str(verdict)})
    if callable(getattr(writer, "add_scalar", None)) and callable(getattr(writer, "add_text", None)):
        for name, value in numbers.items():
            writer.add_scalar(f"pipeproof/{name}", value, step)
        for name, text in texts.items():
            writer.add_text(f"pipeproof/{name}", text, step)
    elif callable(getattr(writer, "log", None)):
        writer.log({f"pipeproof/{name}": value for name, value in {**numbers, **texts}.items()}, step=step)
    else:
        raise WriterError(
            f"writer is a {type(writer).__name__}: expected a SummaryWriter of TensorBoard, a run of wandb, or None"
        )
