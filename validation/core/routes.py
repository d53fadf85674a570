"""Compare routed tokens with the reference's scores, after equal routes upstream.

A changed expert counts as rounding if rounding on this run can move its scores that far; otherwise it is wrong.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pipeproof.core.ledger import Ledger
from pipeproof.core.mismatch import Mismatch
from pipeproof.core.observe.observed import Observed, Routed
from pipeproof.core.observe.routes import Route
from pipeproof.core.oracle import Answer
from pipeproof.core.tolerance import Floor
from pipeproof.pipeline.sizes import some
from pipeproof.reference.choices import Choice, of_experts, same_T

LAW = "routing"
_OUTCOMES = ("", "pass", "unknown", "fail")  # worst last; empty: unchanged
_WORDS = {  # the noun, and its verb for one and for several; False: choices by experts
    True: ("token", "changed its expert", "changed their expert"),
    False: ("expert choice", "changed", "changed"),
}


def judge_routes(ledger: Ledger, number: int, answer: Answer, observed: Observed) -> None:
    """Compare each rank's routes in operation ``number``. Ranks with a common stage and microbatch must choose alike.

    A token counts once, by its worst choice.
    """
    first: dict[Routed, tuple[int, Sequence[Route]]] = {}
    counts: dict[bool, Counter[str]] = defaultdict(Counter)  # tokens by outcome; False: expert choices
    for rank, operations in enumerate(observed.ranks):
        for at, routes in operations[number].routes.items():
            leader, known = first.setdefault(at, (rank, routes))
            place = Mismatch(LAW, number + 1, rank=rank, stage=at.stage, microbatch=at.microbatch, router=at.router)
            if leader != rank:
                same = all(one.chosen_TK.equal(two.chosen_TK) for one, two in zip(routes, known, strict=True))
                ledger.hold(replace(place, beside=leader), same, "other experts", f"those that rank {leader} chose")
                continue
            expected = answer.expected.contributions[at.microbatch].choices[at.router]
            experts, outcomes = of_experts(expected), list[list[str]]()
            for choice_number, (route, choice) in enumerate(zip(routes, expected, strict=True)):
                assert answer.floors is not None, "who says what routers chose is judged by floors"
                floor = partial(answer.floors.scores, at.microbatch, at.router, choice_number)
                outcomes.append(_judge_tokens(ledger, place, route, choice, floor, experts=choice_number in experts))
            counted = [outcomes[one] for one in experts or range(len(expected))]
            for row in zip(*counted, strict=True) if experts else ((one,) for every in counted for one in every):
                counts[bool(experts)][max(row, key=_OUTCOMES.index)] += 1
    if first:
        routers = len({at.router for at in first})
        said = "; ".join(_describe_counts(every, routers, _WORDS[of_tokens]) for of_tokens, every in counts.items())
        ledger.remark(LAW, (f"operation {number + 1}: " if number else "") + said)


def _judge_tokens(
    ledger: Ledger, place: Mismatch, route: Route, choice: Choice, floor: Callable[[], Floor], *, experts: bool
) -> list[str]:
    """Return each token's outcome; empty for an unchanged route.

    experts: tokens choose experts, rather than groups or tokens.
    """
    observed_TK, own_TK = route.chosen_TK, choice.own_TK.cpu()
    other_T = ~same_T(observed_TK, own_TK)
    if not other_T.any():
        ledger.hold(place, True, "", "", exact=observed_TK.equal(own_TK))
        return [""] * len(observed_TK)
    allowed = floor()
    off_T = torch.where(other_T, _off(choice, observed_TK, allowed), 0.0)
    both = zip(off_T.tolist(), other_T.tolist(), strict=True)
    outcomes = [allowed.outcome(off) if other else "" for off, other in both]
    worst = int(off_T.argmax())
    of, row = ("expert", "token {}") if experts else ("number", "row {} of the scores")
    observed, expected = (_some(of if choice.of_tokens else "token", one[worst]) for one in (observed_TK, own_TK))
    wrong = sum(one not in ("", "pass") for one in outcomes) - 1
    more = f", and others for {wrong:,} more" if wrong > 0 else ""
    types = route.dtype, choice.scores_TE.dtype
    if all(one.is_floating_point for one in types) and torch.finfo(types[0]).eps > torch.finfo(types[1]).eps:
        narrow, wide = (str(one).removeprefix("torch.") for one in types)
        more += f", by scores in {narrow}, not {wide}"
    ledger.estimate(place, off_T[worst].item(), allowed, f"{observed} for {row.format(worst)}{more}", expected)
    return outcomes


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
