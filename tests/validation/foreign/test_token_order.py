"""The order of tokens on ranks, told by where they go."""

import pytest
import torch
from torch import Tensor

from pipeproof.foreign.token_order import in_order, joined
from pipeproof.observers.routes import Route
from pipeproof.reference.choices import Choice

TOKENS = 24
EXPERTS = torch.randint(8, (TOKENS, 2), generator=torch.Generator().manual_seed(0))
GROUPS = torch.arange(2 * TOKENS).view(-1, 1)  # two choices for each token before that
KEPT = torch.tensor([[0, 5, 23]])  # tokens that an expert keeps
DUE = [
    *(Choice(torch.zeros(len(own), 48).scatter(1, own, 1.0), own, own) for own in (GROUPS, EXPERTS)),
    Choice(torch.zeros(1, TOKENS), KEPT, KEPT, of_tokens=False),
]
EVERY = torch.arange(TOKENS)
SEQUENCE_FIRST = EVERY.view(4, 6).T.flatten()  # which of the reference's tokens is where


def seen(order: Tensor, *, count: int = 3) -> list[Route]:
    """What is chosen where the tokens are in this order."""
    chosen = [GROUPS.view(TOKENS, 2)[order].view(-1, 1), EXPERTS[order], order.argsort()[KEPT]]
    return [Route(one, torch.float32) for one in chosen[:count]]


@pytest.mark.parametrize("order", [EVERY, SEQUENCE_FIRST, EVERY.view(2, 12).T.flatten()])
def test_rows_or_sequences_may_come_first(order: Tensor) -> None:
    found = in_order(seen(order), DUE)
    assert found is not None
    assert all(torch.equal(one.chosen_TK, choice.own_TK) for one, choice in zip(found, DUE, strict=True))


@pytest.mark.parametrize("order", [EVERY, SEQUENCE_FIRST, EVERY.view(4, 2, 3).transpose(0, 1).flatten()])
def test_parts_are_put_together(order: Tensor) -> None:
    halves = [{"gate": [Route(EXPERTS[part], torch.float32)]} for part in order.chunk(2)]
    (whole,) = joined(halves)["gate"]
    found = in_order([whole], DUE[1:2], parts=2)
    assert found is not None
    assert torch.equal(found[0].chosen_TK, EXPERTS)


def test_among_experts_that_are_nearly_equal_tokens_stay_where_they_are() -> None:
    """Where few tokens change theirs by rounding, by chance another order may be nearer to the reference."""
    scores = torch.ones(TOKENS, 48).scatter(1, EXPERTS, 1 + 1e-7)
    own = seen(SEQUENCE_FIRST)[1:2]
    assert in_order(own, [Choice(scores, EXPERTS, EXPERTS)]) == own


def test_an_order_that_does_not_show_is_not_guessed() -> None:
    mixed = seen(torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1)), count=2)
    assert in_order(mixed, DUE[:2]) == mixed, "whole, it may be wrong"
    assert in_order(mixed, DUE[:2], parts=2) is None, "in parts, nobody knows"
    assert in_order(seen(SEQUENCE_FIRST), DUE, parts=2) is None, "experts chose among the tokens of a part"
