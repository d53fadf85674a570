"""Wrong pairs from stage to stage: the exchange that explains them all, and its place.

An error shows first in the stage nearest to the loss; earlier stages work with its consequence. The activations that
they pair with it separate the exchanges.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeproof.core.cause import Cause
from pipeproof.explain.atoms import Explanation, Term, Update
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
    """Exchanges behind all wrong pairs, each once, with all its microbatches; and pairs beside the right ones."""
    every = list(chains(stages))
    added = []  # to both right pairs, and in the place of neither
    for chain in every:
        right = [Term("pair", m, m) for m in chain.term[1:]]
        added += [chain] if all(map(stages[chain.stage].coefficients.get, right)) else []
    found = {chain: _readings(update, stages, chain) for chain in every if chain not in added}
    groups: dict[tuple[Reading, ...], list[Chain]] = {}
    for chain, readings in found.items():
        beside = [others for other, others in found.items() if other.stage == chain.stage]
        common = [one for one in readings if all(one in others for others in beside)]
        groups.setdefault(tuple(common or readings), []).append(chain)
    causes = []
    for likely, alike in groups.items():  # the likeliest, with alternatives
        each = []
        for kind, stage, detail in likely:
            slots = set()  # the microbatches whose work went wrong: for data, the unrepeated ones
            for chain in alike:
                by_target = kind == "swapped-data" and _by_use(stages[chain.stage]) == ["swapped-gradients"]
                own = kind == "swapped-gradients" or by_target
                slots.add(chain.term.activation if own else chain.term.gradient)
            each.append(Cause(kind, stage=stage, microbatches=tuple(sorted(slots)), detail=detail))
        causes.append(replace(each[0], instead=tuple(each[1:])))
    terms: dict[Stage, dict[int, list[int]]] = {}
    for chain in added:
        terms.setdefault(chain.stage, {}).setdefault(chain.term.activation, []).append(chain.term.gradient)
    for stage, also in terms.items():
        text = "; ".join(f"{i} also met that of {', '.join(map(str, sorted(js)))}" for i, js in sorted(also.items()))
        detail = f"beside its own output gradient, the activation of microbatch {text}"
        causes.append(Cause("extra-term", stage=stage, microbatches=tuple(sorted(also)), detail=detail))
    return causes


def chains(stages: Sequence[Explanation]) -> Iterator[Chain]:
    """Every wrong pair, without mere consequences."""
    for one in reversed(stages):
        for term, c in one.coefficients.items() if one.explained else ():
            paired = term.what == "logits" or (term.what == "pair" and not term.nominal)
            happened = term not in one.undecided or c == round(c)  # real events occur a whole number of times
            if c and paired and happened:
                yield Chain(term, one.stage, tuple(_follow(stages, one.stage, term)))


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
    """Exchanges that may explain a chain, by kind, stage and detail, likeliest first.

    Where a target met another microbatch's outputs, the exchange happened at the stage whose activations change; if
    only targets were repeated, no activation was exchanged.
    """
    (i, j), followed, last = chain.term[1:], chain.followed, update.now.stages - 1
    kinds = _by_use(stages[chain.stage])
    if chain.stage != last or (chain.term.what != "pair" and chain.term not in stages[last].undecided):
        if followed:
            return [("swapped-gradients" if followed[0] == i else "swapped-activations", chain.stage, "")]
        return [(kind, chain.stage, "") for kind in kinds]
    # Targets are exchanged more easily than gradients there.
    other: list[Reading] = [] if chain.term.what == "pair" else [("swapped-gradients", last, "")]
    same = next((k for k, activation in enumerate(followed) if activation != i), len(followed))
    first = last - same  # the first stage that worked on microbatch i's activation
    if first == 0:
        return [("swapped-data", None, "inputs of one microbatch met the target of another"), *other]
    if len(followed) > same and followed[same] == j:
        return [("swapped-activations", first, "in its forward: it was given another microbatch's input"), *other]
    or_given: list[Reading] = [] if kinds == ["swapped-gradients"] else [("swapped-activations", None, "")]
    return [("swapped-data", None, ""), *or_given, *other]


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
