"""What is wrong with how often each microbatch is in a sum: the faults that make such coefficients."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from validation.diagnosis.update import Update

SAME = 1e-3  # factors that differ by no more, relatively, are one


@dataclass(frozen=True)
class Fault:
    """What is wrong in a stage's coefficients; ``within``: how far, relatively, rounding may have moved its factor."""

    kind: str
    microbatches: tuple[int, ...] = ()
    factor: float | None = None
    detail: str = ""
    within: float = field(default=SAME, compare=False)

    def same(self, other: "Fault") -> bool:
        """Whether both are one fault, seen twice: alike but for how rounding moved the factor."""
        if self.factor is None or other.factor is None:
            return self == other
        near = abs(self.factor - other.factor) <= max(self.within, other.within) * abs(self.factor)
        return near and (self.kind, self.microbatches) == (other.kind, other.microbatches)


def weighed(update: Update, found: Mapping[int, float], within: float) -> Iterator[Fault]:
    """What is wrong with the coefficients of microbatches, each of which should be 1, up to ``within``."""
    uneven = _uneven(update, found, within)
    if uneven is not None:
        yield uneven
        return
    base = _base(list(found.values()), within)
    if abs(base - 1.0) > within:
        yield uniform(update, base, within)
    if base == 0.0:
        return
    odd: dict[float, list[int]] = {}
    for microbatch, c in found.items():
        ratio = c / base
        if abs(ratio - 1) > within:
            same = next((known for known in odd if abs(known - ratio) <= within * abs(known)), ratio)
            odd.setdefault(same, []).append(microbatch)
    for ratio, microbatches in sorted(odd.items()):
        yield _some(update, ratio, tuple(microbatches), within)


def _base(values: list[float], within: float) -> float:
    """The factor that most microbatches have, or 1."""
    groups: Counter[float] = Counter()
    for value in values:
        groups[next((g for g in groups if abs(g - value) <= within * max(abs(g), abs(value))), value)] += 1
    (base, count), *_ = groups.most_common(1)
    if count == len(values) or (2 * count > len(values) and base != 0.0):
        return base
    return 1.0


def uniform(update: Update, factor: float, within: float) -> Fault:
    """The fault of what is as a whole ``factor`` times what it should be."""
    if factor == 0.0:
        return Fault("zero")
    if factor == -1.0:
        return Fault("sign", factor=-1.0)
    return Fault("scale", factor=factor, detail=factor_words(update, factor, within), within=within)


def _some(update: Update, ratio: float, microbatches: tuple[int, ...], within: float) -> Fault:
    if abs(ratio) <= within:
        return Fault("dropped", microbatches)
    undivided = ratio == update.now.microbatches > 2  # by their number; nothing is counted so often by chance
    if ratio == round(ratio) and ratio >= 2 and not undivided:
        detail = "" if ratio == 2 else f"{ratio:g} times"
        return Fault("doubled", microbatches, factor=ratio, detail=detail)
    kind = "sign" if ratio == -1 else "scale"
    detail = factor_words(update, ratio, within)
    return Fault(kind, microbatches, factor=ratio, detail=detail, within=within)


def _uneven(update: Update, found: Mapping[int, float], within: float) -> Fault | None:
    """Microbatches weighted by their tokens, or alike, where it should be the other way round.

    Not those that all have one factor, least of all none: that is in proportion to anything.
    """
    counts = {i: float(batch.tokens) for i, batch in enumerate(update.now.batches)}
    if not all(counts.values()) or len(set(found.values())) == 1:
        return None  # nobody knows how many targets count
    for weights, words in ((counts, "by their tokens, not alike"), ({i: 1 / n for i, n in counts.items()}, "alike")):
        ratios = [found[i] / weights[i] for i in found]
        if len(set(counts.values())) > 1 and max(ratios) - min(ratios) <= within * abs(max(ratios)):
            return Fault("unequal-weights", factor=None, detail=f"microbatches count {words}")
    return None


def factor_words(update: Update, factor: float, within: float = SAME) -> str:
    """Where a factor may come from: every number of things in this step that it is, or is one over."""
    count, tokens = len(update.now.batches), sum(batch.tokens for batch in update.now.batches)
    known = {
        "the number of microbatches": count,
        "the square of the number of microbatches": count**2,
        "the number of tokens": tokens,
        "tokens per microbatch": tokens / count,
        "the number of stages": update.now.stages,
        "the number of ranks" + " of a replica" * (update.replicas > 1): update.ranks or len(set(update.placement)),
        "the number of replicas": update.replicas,
    }
    minus, size = ("minus " if factor < 0 else ""), abs(factor)
    told = {name: value for name, value in known.items() if value not in (0, 1)}
    times = {name: value for name, value in told.items() if abs(size - value) <= within * value}
    over = {name: value for name, value in told.items() if abs(size - 1 / value) <= within / value}
    for found, fraction, words in ((times, "", ""), (over, "1/", "one over ")):
        if found:
            return f"{minus}{fraction}{next(iter(found.values())):g}, {words}{' or '.join(found)}"
    digits = 6 if within <= SAME else math.ceil(-math.log10(within))
    return f"{factor:.{digits}g} times"
