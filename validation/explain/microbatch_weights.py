"""Faults that change how often each microbatch counts in a sum."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.explain.atoms import Update
from pipeproof.explain.limits import ALIKE, LEFT
from pipeproof.pipeline.sizes import digits

_DIGITS = 6  # of a factor, at most


def faults_in_counts(update: Update, found: Mapping[int, float], within: float) -> Iterator[Cause]:
    """Faults in the coefficients of microbatches, each 1 if right, up to ``within``.

    Beside a common factor, deviations are separate faults if they happened a whole number of times, and otherwise part
    of that factor's fault.
    """
    for weights, words in _weightings(update) if len(set(found.values())) > 1 else ():
        ratios = [found[i] / weights[i] for i in found]
        if len(set(weights.values())) > 1 and max(ratios) - min(ratios) <= max(ALIKE, within) * abs(max(ratios)):
            yield Cause("unequal-weights", detail=words)
            return
    base = _base(list(found.values()), within)
    odd: dict[float, list[int]] = {}
    for microbatch, c in found.items():
        ratio = c / base if base else 1.0
        if abs(ratio - 1) > within:
            same = next((known for known in odd if abs(known - ratio) <= within * abs(known)), ratio)
            odd.setdefault(same, []).append(microbatch)
    # As often as there are microbatches tells a missing division, unless some run in the place of missing ones.
    in_place = abs(sum(found.values()) - len(found)) <= within * len(found)
    undivided = None if in_place or update.now.microbatches <= 2 else update.now.microbatches
    whole = {
        ratio: some
        for ratio, some in odd.items()
        if abs(ratio) <= within or ratio == -1 or (ratio == round(ratio) >= 2 and ratio != undivided)
    }
    again = {ratio: some for ratio, some in odd.items() if ratio > 1 and abs(ratio / round(ratio) - 1) <= within}
    if len(again) > 1:  # each another number of times: no factor gives that
        odd = {ratio: some for ratio, some in odd.items() if ratio not in again}
        whole = {ratio: some for ratio, some in whole.items() if ratio in odd}
        yield Cause("doubled", microbatches=_all(again), detail=", ".join(_list(1.0, again)))
    rest = {ratio: some for ratio, some in odd.items() if ratio not in whole}
    if len(rest) > 1:  # among several factors one that is a whole number is a factor, too
        rest = {ratio: some for ratio, some in odd.items() if ratio in rest or ratio > 1}
        whole = {ratio: some for ratio, some in whole.items() if ratio not in rest}
    if abs(base - 1.0) > within:
        yield replace(one := uniform(update, base, within), detail=", but ".join([one.detail, *_list(base, rest)]))
    elif rest:
        single = next(iter(rest)) if len(rest) == 1 else None
        words = f"{_digits(single, within)} times" if single is not None else ", ".join(_list(1.0, rest))
        yield Cause("scale", microbatches=_all(rest), factor=single, detail=words)
    for ratio, some in sorted(whole.items()):
        one = Cause("dropped", microbatches=tuple(some))
        if abs(ratio) > within:
            times = "" if ratio in (-1, 2) else f"{ratio:g} times"
            one = replace(one, kind="sign" if ratio == -1 else "doubled", factor=ratio, detail=times)
        yield one


def _all(odd: Mapping[float, list[int]]) -> tuple[int, ...]:
    return tuple(sorted(m for some in odd.values() for m in some))


def _base(values: list[float], within: float) -> float:
    """The commonest factor, or 1."""
    groups: Counter[float] = Counter()
    for value in values:
        groups[next((g for g in groups if abs(g - value) <= within * max(abs(g), abs(value))), value)] += 1
    (base, count), *_ = groups.most_common(1)
    if count == len(values) or (2 * count > len(values) and base != 0.0):
        return base
    return 1.0


def uniform(update: Update, factor: float, within: float) -> Cause:
    """Name the fault behind a gradient ``factor`` times the right value."""
    if factor == 0.0:
        return Cause("zero")
    if factor == -1.0:
        return Cause("sign", factor=-1.0)
    return Cause("scale", factor=factor, detail=factor_words(update, factor, min(max(ALIKE, within), LEFT)))


def _list(base: float, odd: Mapping[float, list[int]]) -> Iterator[str]:
    """Describe microbatches with deviating factors."""
    for ratio, some in sorted(odd.items(), key=lambda item: item[1]):
        yield f"microbatch{'es' * (len(some) > 1)} {join_numbers(some)} {ratio * base:.4g} times"


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
