"""Tokens that went to other experts: by rounding, by what may be rounding, or by more."""

from types import SimpleNamespace

import pytest
import torch

from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import FP32
from pipeproof.core.observe.observed import Routed
from pipeproof.core.observe.routes import Route
from pipeproof.core.routes import LAW, explain_choices, judge_routes
from pipeproof.core.tolerance import Floor
from pipeproof.core.verdict import LawResult
from pipeproof.reference.choices import Choice
from tests.support.golden import golden

AT = Routed(0, "gate", 0)
SCORES = torch.tensor([[1.0, 0.5], [1.0, 1.0 - 2e-6], [1.0, 1.0 - 6e-4], [1.0, 1.0]])
OWN = torch.tensor([[0], [0], [0], [0]])
TWO = "2 of 4 tokens changed their expert"
FLOOR = Floor(0.0, 1e-4, 1.0)  # so large a rounding explains what is not excused


def judged(
    *observed: list[list[int]], floor: Floor = FLOOR, expected: Choice | None = None
) -> tuple[Ledger, LawResult]:
    """What is entered where each rank chose such experts for its four tokens."""
    return entered([expected or Choice(SCORES, OWN, OWN)], *([one] for one in observed), floor=floor)


def entered(choices: list[Choice], *ours: list[list[list[int]]], floor: Floor = FLOOR) -> tuple[Ledger, LawResult]:
    """What is entered where a router has such ``choices``, and ranks made them so."""
    ledger = Ledger([LAW])
    expected = SimpleNamespace(expected=SimpleNamespace(contributions=[SimpleNamespace(choices={"gate": choices})]))
    expected.floors = SimpleNamespace(scores=lambda microbatch, router, number: floor)
    ranks = [
        (SimpleNamespace(routes={AT: [Route(torch.tensor(one), torch.float32) for one in every]}),) for every in ours
    ]
    judge_routes(ledger, 0, expected, SimpleNamespace(ranks=ranks))
    return ledger, ledger.laws()[0]


@pytest.mark.parametrize(
    ("observed", "outcome", "told"),
    [
        ([[0], [0], [0], [0]], "pass", "none of 4 tokens changed its expert"),
        ([[0], [0], [0], [1]], "pass", "1 of 4 tokens changed its expert, by rounding"),
        ([[0], [1], [0], [1]], "pass", f"{TWO}, all by rounding"),
        ([[0], [1], [1], [0]], "unknown", f"{TWO}: 1 by rounding, 1 by what may be rounding"),
        ([[1], [1], [0], [0]], "fail", f"{TWO}: 1 by rounding, 1 by more than rounding"),
    ],
)
def test_tokens_are_told_apart_by_what_rounding_does(observed: list[list[int]], outcome: str, told: str) -> None:
    _, law = judged(observed)
    assert (law.outcome, law.note, law.exact) == (outcome, told, int(observed == OWN.tolist()))
    route = Route(torch.tensor(observed), torch.float32)
    assert explain_choices(route, Choice(SCORES, OWN, OWN), lambda: FLOOR) == (outcome != "fail")


def test_the_token_that_is_furthest_off_is_named() -> None:
    (found,) = judged([[1], [1], [0], [0]])[0].mismatches
    assert (found.router, found.microbatch) == ("gate", 0)
    golden(f"{found.observed_text}, expected {found.expected_text}")
    assert (found.error, found.limit) == (0.25, FP32.most)
    (found,) = judged([[1], [1], [1], [0]])[0].mismatches
    golden(found.observed_text)


def test_tokens_are_counted_by_what_gives_them_their_experts() -> None:
    places = Choice(torch.tensor([[3, 0], [2, 0], [1, 0], [0, 4]]), OWN, OWN)  # in an expert's capacity
    for_values = Choice(SCORES, OWN, OWN, of_values=True)
    observed = [OWN.tolist(), [[0], [1], [0], [0]], [[0], [0], [0], [1]], OWN.tolist()]
    own = Choice(SCORES, OWN, OWN)
    golden(entered([for_values, own, own, places], observed)[1].note)


def test_experts_that_choose_tokens_are_no_tokens() -> None:
    ledger, law = judged([[1], [1], [0], [0]], expected=Choice(SCORES, OWN, OWN, of_tokens=False))
    (found,) = ledger.mismatches
    golden(f"{law.note}\n{found.observed_text}, expected {found.expected_text}")


def test_where_scores_are_rounding_alone_their_size_is_what_counts() -> None:
    noise = Floor(0.0, 1.0, 0.0, size=0.01)
    assert judged([[0], [0], [1], [0]], floor=noise)[1].outcome == "pass"
    assert judged([[1], [0], [0], [0]], floor=noise)[1].outcome == "unknown"


def test_a_rank_that_chooses_otherwise_than_another_is_named() -> None:
    ledger, law = judged(OWN.tolist(), [[0], [0], [0], [1]])
    (found,) = ledger.mismatches
    assert (law.outcome, found.rank, found.beside, found.observed_text) == ("fail", 1, 0, "other experts")
