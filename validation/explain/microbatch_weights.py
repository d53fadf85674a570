"""Faults that change how often each microbatch counts in a sum."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from pipeproof.core.cause import join_numbers
from pipeproof.explain.atoms import Update
from pipeproof.explain.limits import ALIKE, LEFT
from pipeproof.pipeline.sizes import digits

_DIGITS = 6  # of a factor, at most


@dataclass(frozen=True)
class Fault:
    """A fault in a stage's coefficients; ``within``: how far, relatively, rounding may have moved its factor.

    ``earlier``: as of a cause.
    """

    kind: str
    microbatches: tuple[int, ...] = ()
    factor: float | None = None
    detail: str = ""
    earlier: int = 0
    within: float = field(default=ALIKE, compare=False)

    def same(self, other: "Fault") -> bool:
        """True for a fault observed twice: equal up to rounding in the factor."""
        if self.factor is None or other.factor is None:
            return self == other
        near = abs(self.factor - other.factor) <= max(self.within, other.within) * abs(self.factor)
        place = self.kind, self.microbatches, self.earlier
        return near and place == (other.kind, other.microbatches, other.earlier)


def faults_in_counts(update: Update, found: Mapping[int, float], within: float) -> Iterator[Fault]:
    """Faults in the coefficients of microbatches, each 1 if right, up to ``within``.

    Beside a common factor, deviations are separate faults if they happened a whole number of times, and otherwise part
    of that factor's fault.
    """
    uneven = _uneven(update, found, max(ALIKE, within))
    if uneven is not None:
        yield uneven
        return
    base = _base(list(found.values()), within)
    odd: dict[float, list[int]] = {}
    for microbatch, c in found.items():
        ratio = c / base if base else 1.0
        if abs(ratio - 1) > within:
            same = next((known for known in odd if abs(known - ratio) <= within * abs(known)), ratio)
            odd.setdefault(same, []).append(microbatch)
    in_place = abs(sum(found.values()) - len(found)) <= within * len(found)  # of missing ones
    whole = {ratio: some for ratio, some in odd.items() if _is_counted(update, ratio, within, in_place=in_place)}
    again = {ratio: some for ratio, some in odd.items() if ratio > 1 and abs(ratio / round(ratio) - 1) <= within}
    if len(again) > 1:  # each another number of times: no factor gives that
        odd = {ratio: some for ratio, some in odd.items() if ratio not in again}
        whole = {ratio: some for ratio, some in whole.items() if ratio in odd}
        every = tuple(sorted(m for some in again.values() for m in some))
        yield Fault("doubled", every, detail=", ".join(_list(1.0, again)))
    rest = {ratio: some for ratio, some in odd.items() if ratio not in whole}
    if len(rest) > 1:  # among several factors one that is a whole number is a factor, too
        rest = {ratio: some for ratio, some in odd.items() if ratio in rest or ratio > 1}
        whole = {ratio: some for ratio, some in whole.items() if ratio not in rest}
    if abs(base - 1.0) > within:
        yield replace(one := uniform(update, base, within), detail=", but ".join([one.detail, *_list(base, rest)]))
    elif rest:
        yield _factors(rest, within)
    for ratio, microbatches in sorted(whole.items()):
        yield _some(ratio, tuple(microbatches), within)


def _base(values: list[float], within: float) -> float:
    """The commonest factor, or 1."""
    groups: Counter[float] = Counter()
    for value in values:
        groups[next((g for g in groups if abs(g - value) <= within * max(abs(g), abs(value))), value)] += 1
    (base, count), *_ = groups.most_common(1)
    if count == len(values) or (2 * count > len(values) and base != 0.0):
        return base
    return 1.0


def uniform(update: Update, factor: float, within: float) -> Fault:
    """Name the fault behind a gradient ``factor`` times the right value."""
    if factor == 0.0:
        return Fault("zero")
    if factor == -1.0:
        return Fault("sign", factor=-1.0)
    room = max(ALIKE, within)
    return Fault("scale", factor=factor, detail=factor_words(update, factor, min(room, LEFT)), within=room)


def _is_counted(update: Update, ratio: float, within: float, *, in_place: bool) -> bool:
    """True for an omission, repetition or sign change: these give whole numbers.

    Excludes the number of microbatches, the sign of a missing division; only with the sum ``in_place`` is it chance.
    """
    undivided = ratio == update.now.microbatches > 2 and not in_place
    return abs(ratio) <= within or ratio == -1 or (ratio == round(ratio) and ratio >= 2 and not undivided)


def _some(ratio: float, microbatches: tuple[int, ...], within: float) -> Fault:
    if abs(ratio) <= within:
        return Fault("dropped", microbatches)
    if ratio == -1:
        return Fault("sign", microbatches, factor=ratio)
    return Fault("doubled", microbatches, factor=ratio, detail="" if ratio == 2 else f"{ratio:g} times")


def _factors(odd: Mapping[float, list[int]], within: float) -> Fault:
    """Merge microbatches with individual factors into a single fault."""
    one = next(iter(odd)) if len(odd) == 1 else None
    every = tuple(sorted(m for some in odd.values() for m in some))
    detail = f"{_digits(one, within)} times" if one is not None else ", ".join(_list(1.0, odd))
    return Fault("scale", every, factor=one, detail=detail, within=max(ALIKE, within))


def _list(base: float, odd: Mapping[float, list[int]]) -> Iterator[str]:
    """Describe microbatches with deviating factors."""
    for ratio, some in sorted(odd.items(), key=lambda item: item[1]):
        yield f"microbatch{'es' * (len(some) > 1)} {join_numbers(some)} {ratio * base:.4g} times"


def _uneven(update: Update, found: Mapping[int, float], within: float) -> Fault | None:
    """Microbatches weighted by tokens in place of alike, or the reverse; or replicas alike.

    Not if all have one factor, least of all zero: that is in proportion to anything.
    """
    if len(set(found.values())) == 1:
        return None
    for weights, words in _weightings(update):
        ratios = [found[i] / weights[i] for i in found]
        if len(set(weights.values())) > 1 and max(ratios) - min(ratios) <= within * abs(max(ratios)):
            return Fault("unequal-weights", factor=None, detail=words)
    return None


def _weightings(update: Update) -> Iterator[tuple[Mapping[int, float], str]]:
    """Possible microbatch weightings, in words."""
    counts = {i: float(batch.tokens) for i, batch in enumerate(update.now.batches)}
    if all(counts.values()):  # else the number of targets that count is unknown
        yield counts, "microbatches count by their tokens, not alike"
        yield {i: 1 / n for i, n in counts.items()}, "microbatches count alike"
    shares = {i: len(range(i % update.replicas, len(counts), update.replicas)) for i in counts}
    every = [shares[i] for i in range(min(update.replicas, len(counts)))]
    yield (
        {i: 1 / n for i, n in shares.items()},
        f"replicas count alike, though they have {join_numbers(every)} microbatches",
    )


def factor_words(update: Update, factor: float, within: float = ALIKE) -> str:
    """Name possible origins for a factor: counts in this step equal to it or its reciprocal."""
    count, tokens = len(update.now.batches), sum(batch.tokens for batch in update.now.batches)
    known = {
        "the number of microbatches": count,
        "the square of the number of microbatches": count**2,
        "the number of tokens": tokens if tokens != count else 0,  # one each: the same as uncounted
        "tokens per microbatch": tokens / count,
        "the number of stages": update.stages or update.now.stages,
        "the number of ranks" + " of a replica" * (update.replicas > 1): update.ranks or len(set(update.placement)),
        "the number of replicas": update.replicas,
    }
    minus, size = ("minus " if factor < 0 else ""), abs(factor)
    counts = {name: value for name, value in known.items() if value not in (0, 1)}
    times = {name: value for name, value in counts.items() if abs(size - value) <= within * value}
    over = {name: value for name, value in counts.items() if abs(size - 1 / value) <= within / value}
    for found, fraction, words in ((times, "", ""), (over, "1/", "1 / ")):
        if found:
            return f"{minus}{fraction}{next(iter(found.values())):g} = {words}{' or '.join(found)}"
    return f"{_digits(factor, within)} times"


def _digits(factor: float, within: float) -> str:
    """Print ``factor`` in the fewest digits that rounding justifies."""
    every = (digits(factor, many) for many in range(1, _DIGITS if within > ALIKE else 1))
    plain = (one for one in every if "e+" not in one)
    return next((one for one in plain if abs(float(one) - factor) <= within * abs(factor)), digits(factor, _DIGITS))
