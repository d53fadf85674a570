"""Wrong pairs from stage to stage: the exchange that explains them all, and its place.

An error shows first in the stage nearest to the loss; earlier stages work with its consequence. The activations that
they pair with it separate the exchanges.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeproof.core.cause import Cause
from pipeproof.explain.atoms import Term, Update
from pipeproof.explain.explanation import Explanation
from pipeproof.reference.step import Stage

Reading = tuple[str, Stage | None, str]  # a kind of exchange, its stage, and more in words


@dataclass(frozen=True)
class Chain:
    """A wrong pair, activation ``activation`` with output gradient ``gradient`` in ``stage``.

    ``followed``: activations that the stages before it paired with its consequence, nearest first.
    """

    term: Term
    stage: Stage
    followed: tuple[int, ...]


def swaps(update: Update, stages: Sequence[Explanation]) -> list[Cause]:
    """Exchanges behind all wrong pairs, each once, with all its microbatches."""
    every = list(chains(stages))
    found = {
        chain: _readings(update, stages, chain) for chain in every if not _is_added(stages[chain.stage], chain.term)
    }
    groups: dict[tuple[Reading, ...], list[Chain]] = {}
    for chain, readings in found.items():
        beside = [others for other, others in found.items() if other.stage == chain.stage]
        common = [one for one in readings if all(one in others for others in beside)]
        groups.setdefault(tuple(common or readings), []).append(chain)
    exchanges = [_exchange(readings, alike, stages) for readings, alike in groups.items()]
    return [*exchanges, *_additions(stages, every)]


def _exchange(readings: Sequence[Reading], alike: Sequence[Chain], stages: Sequence[Explanation]) -> Cause:
    """Merge ``readings`` into the likeliest, with alternatives."""
    causes = []
    for kind, stage, detail in readings:
        slots = sorted({_slot(kind, chain, stages) for chain in alike})
        causes.append(Cause(kind, stage=stage, microbatches=tuple(slots), detail=detail))
    return replace(causes[0], instead=tuple(causes[1:]))


def _is_added(stage: Explanation, term: Term) -> bool:
    """True if a wrong pair adds to both right pairs instead of replacing either."""
    return all(stage.coefficients.get(Term("pair", m, m)) for m in (term.activation, term.gradient))


def _additions(stages: Sequence[Explanation], every: Sequence[Chain]) -> Iterator[Cause]:
    """A cause for each stage whose activations met further output gradients beside their own."""
    terms: dict[Stage, list[Term]] = {}
    for chain in every:
        if _is_added(stages[chain.stage], chain.term):
            terms.setdefault(chain.stage, []).append(chain.term)
    for stage, met in terms.items():
        also: dict[int, list[int]] = {}
        for term in met:
            also.setdefault(term.activation, []).append(term.gradient)
        text = "; ".join(f"{i} also met that of {', '.join(map(str, sorted(js)))}" for i, js in sorted(also.items()))
        detail = f"beside its own output gradient, the activation of microbatch {text}"
        yield Cause("extra-term", stage=stage, microbatches=tuple(sorted(also)), detail=detail)


def chains(stages: Sequence[Explanation]) -> Iterator[Chain]:
    """Every wrong pair, without mere consequences."""
    for one in reversed(stages):
        if one.explained:
            for term, c in one.coefficients.items():
                paired = term.what == "logits" or (term.what == "pair" and not term.nominal)
                if c and paired and _has_happened(c, decided=term not in one.undecided):
                    yield Chain(term, one.stage, tuple(_follow(stages, one.stage, term)))


def _has_happened(c: float, *, decided: bool) -> bool:
    """True if a coefficient is evidence: real events occur a whole number of times."""
    return decided or c == round(c)


def _follow(stages: Sequence[Explanation], stage: Stage, term: Term) -> Iterator[int]:
    """Activations that earlier stages paired with the output of ``term``, until the trail ends."""
    for one in reversed(stages[:stage]):
        number = next((k for k, wrong in enumerate(one.wrong) if wrong.atom.term == term), None)
        flows = [t for t, c in one.coefficients.items() if c and t.what == "flow" and t.gradient == number]
        if not one.explained or len(flows) != 1:
            return
        term = flows[0]
        yield term.activation


def _readings(update: Update, stages: Sequence[Explanation], chain: Chain) -> list[Reading]:
    """Exchanges that may explain a chain, by kind, stage and detail, likeliest first."""
    i, last = chain.term.activation, update.now.stages - 1
    kinds = _by_use(stages[chain.stage])
    if chain.stage == last and (chain.term.what == "pair" or chain.term in stages[last].undecided):
        forward = _forward_readings(chain, last, by_use=kinds)  # targets are exchanged more easily than gradients there
        other = [] if chain.term.what == "pair" else [("swapped-gradients", last, "")]
        return [*forward, *other]
    if chain.followed:
        return [("swapped-gradients" if chain.followed[0] == i else "swapped-activations", chain.stage, "")]
    return [(kind, chain.stage, "") for kind in kinds]


def _forward_readings(chain: Chain, last: Stage, *, by_use: Sequence[str]) -> list[Reading]:
    """A target met another microbatch's outputs: the exchange happened at the stage whose activations change.

    If only targets were repeated, no activation was exchanged.
    """
    i, j = chain.term.activation, chain.term.gradient
    same = next((k for k, activation in enumerate(chain.followed) if activation != i), len(chain.followed))
    first = last - same  # the first stage that worked on microbatch i's activation
    if first == 0:
        return [("swapped-data", None, "inputs of one microbatch met the target of another")]
    if len(chain.followed) > same and chain.followed[same] == j:
        return [("swapped-activations", first, "in its forward: it was given another microbatch's input")]
    others: list[Reading] = [] if by_use == ["swapped-gradients"] else [("swapped-activations", None, "")]
    return [("swapped-data", None, ""), *others]


def _by_use(stage: Explanation) -> list[str]:
    """Name the half used too often or too seldom; both if the counts do not decide.

    A repeated right pair decides nothing: its factor multiplied both halves.
    """
    activations: Counter[int] = Counter()
    gradients: Counter[int] = Counter()
    used = {term: c for term, c in stage.coefficients.items() if c and term.what in ("pair", "logits")}
    once = min(abs(c) for term, c in used.items() if not term.nominal)  # a multiplied pair was used no more often
    for term, c in used.items():
        times = 1 if term.nominal else round(c / once)
        activations[term.activation] += times
        gradients[term.gradient] += times
    uneven = [
        len(set(uses.values())) > 1 or len(uses) < len(activations | gradients) for uses in (activations, gradients)
    ]
    if uneven == [True, False]:
        return ["swapped-activations"]
    if uneven == [False, True]:
        return ["swapped-gradients"]
    # Messages are mistaken for each other more easily than a stage's own stored inputs.
    return ["swapped-gradients", "swapped-activations"]


def _slot(kind: str, chain: Chain, stages: Sequence[Explanation]) -> int:
    """The microbatch whose work went wrong: for data, the unrepeated one."""
    by_target = kind == "swapped-data" and _by_use(stages[chain.stage]) == ["swapped-gradients"]
    return chain.term.activation if kind == "swapped-gradients" or by_target else chain.term.gradient
