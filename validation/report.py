"""The table of a validation: one line per verdict."""

from collections.abc import Sequence

from validation.case import Case
from validation.verdict import Verdict, small

HEADER = (
    f"{'schedule':<12} {'model':<8} {'P':>2} {'V':>2} {'M':>3}  {'split':<15} {'losses':>6} {'params':>6}  "
    f"{'tier':<8} {'worst err':>9} {'floor':>8} {'norm err':>9}  {'verdict':<8} {'time':>7}"
)


def line(case: Case, verdict: Verdict) -> str:
    """One line of the table under ``HEADER``.

    losses and params are how many were compared over the whole plan; worst err and norm err are relative, 0 where
    every bit agreed; floor is what rounding alone does to the worst gradient, or, where all bits agree, to any.
    """
    numbers = ["-"] * 5
    if verdict.laws:
        losses, gradients, norm = (verdict.law(name) for name in ("loss", "gradient", "grad-norm"))
        floor = gradients.floor if gradients.worst else verdict.floor
        numbers = [str(losses.checked), str(gradients.checked), *map(small, (gradients.worst, floor, norm.worst))]
    n_losses, n_gradients, worst, floor_, norm_ = numbers
    split = ",".join(map(str, case.split))
    split = split if len(split) <= 15 else f"{split[:14]}…"
    return (
        f"{case.built.name:<12} {case.model:<8} {case.ranks:>2} {case.virtual:>2} {case.microbatches:>3}  {split:<15} "
        f"{n_losses:>6} {n_gradients:>6}  {verdict.tier:<8} {worst:>9} {floor_:>8} {norm_:>9}  "
        f"{verdict.verdict:<8} {verdict.seconds:>5.1f} s"
    )


def summary(verdicts: Sequence[Verdict], *, left_out: int = 0) -> str:
    """The last line of a table; ``left_out`` schedules were asked for and not run."""
    counts = {outcome: sum(v.verdict == outcome for v in verdicts) for outcome in ("pass", "fail", "unknown")}
    bitwise = sum(v.tier == "bitwise" for v in verdicts)
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count or outcome == "pass")
    missing = f"; {left_out} left out" if left_out else ""
    return f"{said}; {bitwise} of {len(verdicts)} bit for bit{missing}"
