"""Which experts tokens went to, held against the scores of the reference, in which the same tokens went there before.

A token that goes to another expert has changed it by rounding if the scores need be no further off for that than
rounding may put them, on this very run; else it went wrong.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeproof.core.ledger import Heading, Ledger
from pipeproof.core.observe.observed import Observed, Routed
from pipeproof.core.observe.routes import Route
from pipeproof.core.oracle import Answer
from pipeproof.core.tolerance import Floor
from pipeproof.pipeline.sizes import some
from pipeproof.reference.choices import Choice, of_experts, same_T

LAW = "routing"
_OUTCOMES = ("", "pass", "unknown", "fail")  # the worst last; empty: nothing changed


@dataclass
class RouteJudge:
    """Enters into ``ledger`` where the tokens of operation ``number`` went; ``scenarios`` are the laws about it."""

    ledger: Ledger
    number: int
    scenarios: frozenset[str]
    answer: Answer
    # Tokens by their outcome; under False, what experts choose.
    _counts: dict[bool, Counter[str]] = field(default_factory=lambda: defaultdict(Counter), init=False)

    def judge(self, observed: Observed) -> None:
        """Every rank's routes. Those that have a stage and a microbatch in common are to choose alike."""
        first: dict[Routed, tuple[int, Sequence[Route]]] = {}
        for rank, operations in enumerate(observed.ranks):
            for at, routes in operations[self.number].routes.items():
                leader, known = first.setdefault(at, (rank, routes))
                if leader == rank:
                    self._routed(at, routes, rank)
                else:
                    same = all(one.chosen_TK.equal(two.chosen_TK) for one, two in zip(routes, known, strict=True))
                    place = self._place(at, rank, beside=leader)
                    self.ledger.hold(place, same, "other experts", f"those that rank {leader} chose")
        if first:
            later = f"operation {self.number + 1}: " if self.number else ""
            self.ledger.remark(LAW, later + self._told(len({at.router for at in first})))

    def _routed(self, at: Routed, routes: Sequence[Route], rank: int) -> None:
        """What a router chose for a microbatch, choice by choice: a token counts once, by the worst of its own."""
        due = self.answer.expected.contributions[at.microbatch].choices[at.router]
        experts, place = of_experts(due), self._place(at, rank)
        outcomes = [
            self._chosen(place, route, choice, _Number(at, number, number in experts))
            for number, (route, choice) in enumerate(zip(routes, due, strict=True))
        ]
        counted = [outcomes[number] for number in experts or range(len(due))]
        for row in zip(*counted, strict=True) if experts else ((one,) for every in counted for one in every):
            self._counts[bool(experts)][max(row, key=_OUTCOMES.index)] += 1

    def _chosen(self, place: Heading, route: Route, choice: Choice, which: "_Number") -> list[str]:
        """The outcome for each token, which is empty where it went where it should."""
        seen_TK, own_TK = route.chosen_TK, choice.own_TK.cpu()
        other_T = ~same_T(seen_TK, own_TK)
        if not other_T.any():
            self.ledger.hold(place, True, "", "", exact=seen_TK.equal(own_TK))
            return [""] * len(seen_TK)
        assert self.answer.floors is not None, "who says what routers chose is judged by floors"
        floor = self.answer.floors.scores(which.at.microbatch, which.at.router, which.choice)
        off_T = torch.where(other_T, _off(choice, seen_TK, floor), 0.0)
        both = zip(off_T.tolist(), other_T.tolist(), strict=True)
        outcomes = [floor.outcome(off) if other else "" for off, other in both]
        worst = int(off_T.argmax())
        of, row = ("expert", "token {}") if which.experts else ("number", "row {} of the scores")
        of = of if choice.of_tokens else "token"
        told = f"{_some(of, seen_TK[worst])} for {row.format(worst)}{_more(outcomes)}{_narrower(route, choice)}"
        self.ledger.estimate(place, off_T[worst].item(), floor, told, _some(of, own_TK[worst]))
        return outcomes

    def _place(self, at: Routed, rank: int, beside: int | None = None) -> Heading:
        where = {"rank": rank, "stage": at.stage, "microbatch": at.microbatch, "router": at.router, "beside": beside}
        return Heading.at(LAW, self.number, self.scenarios, **where)

    def _told(self, routers: int) -> str:
        """How many tokens changed their experts, and why; where experts choose tokens, how many choices."""
        return "; ".join(
            _changed(counts, routers, ("token", "changed its expert", "changed their expert"))
            if of_tokens
            else _changed(counts, routers, ("expert choice", "changed", "changed"))
            for of_tokens, counts in self._counts.items()
        )


def explained(route: Route, choice: Choice, floor: Callable[[], Floor]) -> bool:
    """Whether rounding may be why tokens went where they did, for each that went elsewhere than its scores say."""
    seen_TK = route.chosen_TK
    other_T = ~same_T(seen_TK, choice.own_TK.cpu())
    if not other_T.any():
        return True
    measured = floor()
    return all(measured.outcome(off) != "fail" for off in _off(choice, seen_TK, measured)[other_T].tolist())


def _changed(counts: Counter[str], routers: int, words: tuple[str, str, str]) -> str:
    """How many of all changed, by their outcomes; ``words``: what they are, and that one changed, or several."""
    what, one, several = words
    whole = some(counts.total(), what) + (f" in {some(routers, 'router')}" if routers > 1 else "")
    changed = counts.total() - counts[""]
    if not changed:
        return f"none of {whole} {one}"
    did = one if changed == 1 else several
    if changed == counts["pass"]:
        return f"{changed:,} of {whole} {did}, {'all ' if changed > 1 else ''}by rounding"
    parts = (("pass", "by rounding"), ("unknown", "by what may be rounding"), ("fail", "by more than rounding"))
    return f"{changed:,} of {whole} {did}: " + ", ".join(
        f"{counts[outcome]:,} {why}" for outcome, why in parts if counts[outcome]
    )


@dataclass(frozen=True)
class _Number:
    """Which choice of a router it is; ``experts``: whether of these, not of groups of them, nor of tokens."""

    at: Routed
    choice: int
    experts: bool


def _off(choice: Choice, seen_TK: Tensor, floor: Floor) -> Tensor:
    """For each token, how far off the scores must at least be for it, as a floor counts it."""
    scores_TE = choice.scores_TE.double()
    largest = scores_TE[scores_TE.isfinite()].abs().max().item() if scores_TE.isfinite().any() else 0.0
    size = floor.size if floor.noise else largest
    short_T = choice.short_T(seen_TK.to(scores_TE.device)).cpu()  # one may be less, and the other more
    return torch.where(short_T > 0, short_T / (2 * size), 0.0) if size else short_T * torch.inf


def _some(what: str, chosen_K: Tensor) -> str:
    every = sorted(chosen_K.tolist())
    return f"{what}{'s' * (len(every) > 1)} {', '.join(map(str, every))}"


def _more(outcomes: Sequence[str]) -> str:
    wrong = sum(one not in ("", "pass") for one in outcomes) - 1
    return f", and others for {wrong:,} more" if wrong > 0 else ""


def _narrower(route: Route, choice: Choice) -> str:
    """What is to be said of scores in a type with less digits."""
    seen, due = route.dtype, choice.scores_TE.dtype
    if not (seen.is_floating_point and due.is_floating_point) or torch.finfo(seen).eps <= torch.finfo(due).eps:
        return ""
    return f", by scores in {str(seen).removeprefix('torch.')}, not {str(due).removeprefix('torch.')}"
