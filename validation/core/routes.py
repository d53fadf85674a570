"""Compare routed tokens with the reference's scores, after equal routes upstream.

A changed expert counts as rounding if rounding on this run can move its scores that far; otherwise it is wrong.
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
_OUTCOMES = ("", "pass", "unknown", "fail")  # worst last; empty: unchanged


@dataclass
class RouteJudge:
    """Compares routes in operation ``number``. ``scenarios``: laws about it."""

    ledger: Ledger
    number: int
    scenarios: frozenset[str]
    answer: Answer
    # Tokens by outcome; key False: expert choices.
    _counts: dict[bool, Counter[str]] = field(default_factory=lambda: defaultdict(Counter), init=False)

    def judge(self, observed: Observed) -> None:
        """Compare each rank's routes. Ranks with a common stage and microbatch must choose alike."""
        first: dict[Routed, tuple[int, Sequence[Route]]] = {}
        for rank, operations in enumerate(observed.ranks):
            for at, routes in operations[self.number].routes.items():
                leader, known = first.setdefault(at, (rank, routes))
                if leader == rank:
                    self._judge_route(at, routes, rank)
                else:
                    same = all(one.chosen_TK.equal(two.chosen_TK) for one, two in zip(routes, known, strict=True))
                    place = self._place(at, rank, beside=leader)
                    self.ledger.hold(place, same, "other experts", f"those that rank {leader} chose")
        if first:
            later = f"operation {self.number + 1}: " if self.number else ""
            self.ledger.remark(LAW, later + self._describe_routers(len({at.router for at in first})))

    def _judge_route(self, at: Routed, routes: Sequence[Route], rank: int) -> None:
        """Compare a router's choices for a microbatch. A token counts once, by its worst choice."""
        expected = self.answer.expected.contributions[at.microbatch].choices[at.router]
        experts, place = of_experts(expected), self._place(at, rank)
        outcomes = [
            self._judge_tokens(place, route, choice, _Number(at, number, number in experts))
            for number, (route, choice) in enumerate(zip(routes, expected, strict=True))
        ]
        counted = [outcomes[number] for number in experts or range(len(expected))]
        for row in zip(*counted, strict=True) if experts else ((one,) for every in counted for one in every):
            self._counts[bool(experts)][max(row, key=_OUTCOMES.index)] += 1

    def _judge_tokens(self, place: Heading, route: Route, choice: Choice, which: "_Number") -> list[str]:
        """Return each token's outcome; empty for an unchanged route."""
        observed_TK, own_TK = route.chosen_TK, choice.own_TK.cpu()
        other_T = ~same_T(observed_TK, own_TK)
        if not other_T.any():
            self.ledger.hold(place, True, "", "", exact=observed_TK.equal(own_TK))
            return [""] * len(observed_TK)
        assert self.answer.floors is not None, "who says what routers chose is judged by floors"
        floor = self.answer.floors.scores(which.at.microbatch, which.at.router, which.choice)
        off_T = torch.where(other_T, _off(choice, observed_TK, floor), 0.0)
        both = zip(off_T.tolist(), other_T.tolist(), strict=True)
        outcomes = [floor.outcome(off) if other else "" for off, other in both]
        worst = int(off_T.argmax())
        of, row = ("expert", "token {}") if which.experts else ("number", "row {} of the scores")
        of = of if choice.of_tokens else "token"
        text = f"{_some(of, observed_TK[worst])} for {row.format(worst)}{_more(outcomes)}{_narrower(route, choice)}"
        self.ledger.estimate(place, off_T[worst].item(), floor, text, _some(of, own_TK[worst]))
        return outcomes

    def _place(self, at: Routed, rank: int, beside: int | None = None) -> Heading:
        where = {"rank": rank, "stage": at.stage, "microbatch": at.microbatch, "router": at.router, "beside": beside}
        return Heading.at(LAW, self.number, self.scenarios, **where)

    def _describe_routers(self, routers: int) -> str:
        """Count tokens with changed experts, and why; for expert choice, count choices."""
        return "; ".join(
            _describe_counts(counts, routers, ("token", "changed its expert", "changed their expert"))
            if of_tokens
            else _describe_counts(counts, routers, ("expert choice", "changed", "changed"))
            for of_tokens, counts in self._counts.items()
        )


def explain_choices(route: Route, choice: Choice, floor: Callable[[], Floor]) -> bool:
    """True if rounding may explain each token that left its scores' choice."""
    observed_TK = route.chosen_TK
    other_T = ~same_T(observed_TK, choice.own_TK.cpu())
    if not other_T.any():
        return True
    measured = floor()
    return all(measured.outcome(off) != "fail" for off in _off(choice, observed_TK, measured)[other_T].tolist())


def _describe_counts(counts: Counter[str], routers: int, words: tuple[str, str, str]) -> str:
    """Count changes by outcome. ``words``: the noun, and its verb for one and for several."""
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
    """A router's choice number. ``experts``: tokens choose experts, rather than groups or tokens."""

    at: Routed
    choice: int
    experts: bool


def _off(choice: Choice, observed_TK: Tensor, floor: Floor) -> Tensor:
    """Return the smallest score error that explains each token's route, in floor units."""
    scores_TE = choice.scores_TE.double()
    largest = scores_TE[scores_TE.isfinite()].abs().max().item() if scores_TE.isfinite().any() else 0.0
    size = floor.size if floor.noise else largest
    short_T = choice.short_T(observed_TK.to(scores_TE.device)).cpu()  # both scores may be off, in opposite directions
    return torch.where(short_T > 0, short_T / (2 * size), 0.0) if size else short_T * torch.inf


def _some(what: str, chosen_K: Tensor) -> str:
    every = sorted(chosen_K.tolist())
    return f"{what}{'s' * (len(every) > 1)} {', '.join(map(str, every))}"


def _more(outcomes: Sequence[str]) -> str:
    wrong = sum(one not in ("", "pass") for one in outcomes) - 1
    return f", and others for {wrong:,} more" if wrong > 0 else ""


def _narrower(route: Route, choice: Choice) -> str:
    """Mention scores in a narrower type."""
    observed, expected = route.dtype, choice.scores_TE.dtype
    if (
        not (observed.is_floating_point and expected.is_floating_point)
        or torch.finfo(observed).eps <= torch.finfo(expected).eps
    ):
        return ""
    return f", by scores in {str(observed).removeprefix('torch.')}, not {str(expected).removeprefix('torch.')}"
