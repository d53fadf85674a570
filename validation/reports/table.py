"""The table of a validation: one line per verdict."""

from collections.abc import Sequence

from validation.cases.case import Case
from validation.judging.verdict import Verdict, small

HEADER = (
    f"{'schedule':<12} {'model':<8} {'dtype':<5} {'P':>2} {'V':>2} {'M':>3}  {'split':<15} "
    f"{'losses':>6} {'params':>6}  {'tier':<7} {'worst err':>9} {'floor':>7} {'norm err':>8}  "
    f"{'verdict':<7} {'time':>6}"
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
        f"{case.built.name:<12} {case.model:<8} {case.dtype:<5} {case.ranks:>2} {case.virtual:>2} "
        f"{case.microbatches:>3}  {split:<15} {n_losses:>6} {n_gradients:>6}  "
        f"{verdict.tier:<7} {worst:>9} {floor_:>7} {norm_:>8}  {verdict.verdict:<7} {verdict.seconds:>4.1f} s"
    )


def summary(verdicts: Sequence[Verdict], *, left_out: int = 0) -> str:
    """The last line of a table; ``left_out`` schedules were asked for and not run."""
    counts = {outcome: sum(v.verdict == outcome for v in verdicts) for outcome in ("pass", "fail", "unknown")}
    bitwise = sum(v.tier == "bitwise" for v in verdicts)
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count or outcome == "pass")
    missing = f"; {left_out} left out" if left_out else ""
    return f"{said}; {bitwise} of {len(verdicts)} bit for bit{missing}"
