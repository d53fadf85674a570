"""Which experts tokens went to, held against the scores of the reference, in which the same tokens went there before.

A token that goes to another expert has changed it by rounding if the scores need be no further off for that than
rounding may put them, on this very run; else it went wrong.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeproof.judging.ledger import Heading, Ledger
from pipeproof.judging.oracle import Answer
from pipeproof.judging.tolerance import Floor
from pipeproof.observers.observed import Observed, Routed
from pipeproof.observers.routes import Route
from pipeproof.pipeline.sizes import some
from pipeproof.reference.choices import Choice, same_T

LAW = "routing"


@dataclass
class RouteJudge:
    """Enters into ``ledger`` where the tokens of operation ``number`` went; ``scenarios`` are the laws about it."""

    ledger: Ledger
    number: int
    scenarios: frozenset[str]
    answer: Answer
    _tokens: int = field(default=0, init=False)
    _changed: Counter[str] = field(default_factory=Counter, init=False)  # tokens, by the outcome

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
        """What a router chose for a microbatch, choice by choice: the last for tokens is that of experts."""
        due = self.answer.expected.contributions[at.microbatch].choices[at.router]
        experts = max((number for number, choice in enumerate(due) if choice.of_tokens), default=len(due) - 1)
        for number, (route, choice) in enumerate(zip(routes, due, strict=True)):
            last = number == experts
            self._tokens += len(route.chosen_TK) if last else 0
            self._chosen(self._place(at, rank), route, choice, _Number(at, number, last))

    def _chosen(self, place: Heading, route: Route, choice: Choice, which: "_Number") -> None:
        seen_TK, own_TK = route.chosen_TK, choice.own_TK.cpu()
        other_T = ~same_T(seen_TK, own_TK)
        if not other_T.any():
            self.ledger.hold(place, True, "", "", exact=seen_TK.equal(own_TK))
            return
        assert self.answer.floors is not None, "who says what routers chose is judged by floors"
        floor = self.answer.floors.scores(which.at.microbatch, which.at.router, which.choice)
        off_T = torch.where(other_T, _off(choice, seen_TK, floor), 0.0)
        outcomes = [floor.outcome(off) for off in off_T.tolist()]
        if which.last:
            self._changed.update(what for what, other in zip(outcomes, other_T.tolist(), strict=True) if other)
        worst = int(off_T.argmax())
        told = f"{_experts(seen_TK[worst])} for token {worst}{_more(outcomes)}{_narrower(route, choice)}"
        self.ledger.estimate(place, off_T[worst].item(), floor, told, _experts(own_TK[worst]))

    def _place(self, at: Routed, rank: int, beside: int | None = None) -> Heading:
        where = {"rank": rank, "stage": at.stage, "microbatch": at.microbatch, "router": at.router, "beside": beside}
        return Heading.at(LAW, self.number, self.scenarios, **where)

    def _told(self, routers: int) -> str:
        """How many tokens changed their experts, and why."""
        whole = f"{self._tokens:,} tokens" + (f" in {some(routers, 'router')}" if routers > 1 else "")
        changed = self._changed.total()
        if not changed:
            return f"none of {whole} changed its expert"
        whose = "its" if changed == 1 else "their"
        if changed == self._changed["pass"]:
            return f"{changed:,} of {whole} changed {whose} expert, {'all ' if changed > 1 else ''}by rounding"
        parts = (("pass", "by rounding"), ("unknown", "by what may be rounding"), ("fail", "by more than rounding"))
        return f"{changed:,} of {whole} changed {whose} expert: " + ", ".join(
            f"{self._changed[outcome]:,} {why}" for outcome, why in parts if self._changed[outcome]
        )


@dataclass(frozen=True)
class _Number:
    """Which choice of a router it is; ``last``: that of experts, not of groups of them, nor of tokens."""

    at: Routed
    choice: int
    last: bool


def _off(choice: Choice, seen_TK: Tensor, floor: Floor) -> Tensor:
    """For each token, how far off the scores must at least be for it, as a floor counts it."""
    scores_TE = choice.scores_TE.double()
    largest = scores_TE[scores_TE.isfinite()].abs().max().item() if scores_TE.isfinite().any() else 0.0
    size = floor.size if floor.noise else largest
    short_T = choice.short_T(seen_TK.to(scores_TE.device)).cpu()  # one may be less, and the other more
    return torch.where(short_T > 0, short_T / (2 * size), 0.0) if size else short_T * torch.inf


def _experts(chosen_K: Tensor) -> str:
    every = sorted(chosen_K.tolist())
    return f"expert{'s' * (len(every) > 1)} {', '.join(map(str, every))}"


def _more(outcomes: Sequence[str]) -> str:
    wrong = sum(one != "pass" for one in outcomes) - 1
    return f", and others for {some(wrong, 'more token')}" if wrong > 0 else ""


def _narrower(route: Route, choice: Choice) -> str:
    """What is to be said of scores in a type with less digits."""
    seen, due = route.dtype, choice.scores_TE.dtype
    if not (seen.is_floating_point and due.is_floating_point) or torch.finfo(seen).eps <= torch.finfo(due).eps:
        return ""
    return f", by scores in {str(seen).removeprefix('torch.')}, not {str(due).removeprefix('torch.')}"
