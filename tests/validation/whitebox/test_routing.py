"""What ranks' routers chose, paired with the routers and microbatches of the reference."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.observed import Routed
from pipeproof.core.observe.routes import Route
from pipeproof.core.tolerance import Floor
from pipeproof.reference.choices import Choice
from pipeproof.whitebox.routing import Routing, in_own_order, join_routes
from tests.support.golden import golden

OWN = [torch.tensor([[m], [m], [2]]) for m in range(2)]  # of each microbatch, which expert its tokens go to


def made() -> list[Any]:
    """A reference with a router in each of two stages."""
    choices = [[Choice(torch.zeros(3, 3).scatter(1, own, 1.0), own, own)] for own in OWN]
    return [SimpleNamespace(choices={"a.gate": one, "b.gate": one}) for one in choices]


def found(*stages: dict[str, list[torch.Tensor]], share: tuple[int, ...] | None = None) -> Any:
    """Ranks with a stage each, whose routers chose that."""
    parts = [
        SimpleNamespace(
            members=(), routes={name: [Route(one, torch.float32) for one in every] for name, every in own.items()}
        )
        for own in stages
    ]
    return SimpleNamespace(
        stages=[SimpleNamespace(index=k, rank=k, part=part) for k, part in enumerate(parts)],
        owner={"a.gate.weight": 0, "b.expert.weight": 1},  # the router of b has none of its own
        made=[SimpleNamespace(share=share) for _ in parts],
    )


def test_routers_are_paired_stage_by_stage() -> None:
    routing = Routing.of(found({"router": OWN}, {"": OWN}), made())
    assert {rank: [*own] for rank, own in routing.ranks.items()} == {
        0: [Routed(0, "a.gate", 0), Routed(0, "a.gate", 1)],
        1: [Routed(1, "b.gate", 0), Routed(1, "b.gate", 1)],
    }
    assert not routing.reason
    assert not routing.differs(made())
    flipped = Routing.of(found({"router": OWN}, {"": [OWN[0], OWN[1].flip(0)]}), made())
    assert flipped.differs(made())
    assert [sorted(told) for told in flipped.choices(2)] == [["a.gate", "b.gate"]] * 2


def test_after_a_wrong_choice_the_references_scores_count() -> None:
    wrong = [OWN[0], OWN[1].flip(0)]
    both = found({"first": wrong, "second": wrong})
    both.owner = {"a.gate.weight": 0, "b.gate.weight": 0}
    routing = Routing.of(both, made()).with_wrong(made(), lambda microbatch, router, choice: Floor(0.0, 1e-7, 1.0))
    assert routing.wrong == {("a.gate", 1)}
    kept = {Routed(0, "a.gate", 0), Routed(0, "a.gate", 1), Routed(0, "b.gate", 0)}
    assert {*routing.ranks[0]} == kept, "what a later router chose follows from it"
    assert [sorted(told) for told in routing.choices(2)] == [["a.gate", "b.gate"], []]
    assert not routing.differs(made())


def test_tokens_tell_the_order_of_microbatches() -> None:
    routing = Routing.of(found({"router": OWN[::-1]}, {"router": OWN}), made())
    assert not routing.differs(made())
    shared = Routing.of(found({"router": [OWN[1]]}, {"router": [OWN[1]]}, share=(1,)), made())
    assert [*shared.ranks[0]] == [Routed(0, "a.gate", 1)]
    alike = Routing.of(found({"router": [OWN[0], OWN[0]]}, {"router": OWN}), made())
    assert alike.differs(made()), "two are not one: they stay as they come"


def test_one_router_in_another_order_is_wrong() -> None:
    both = found({"first": OWN, "second": OWN[::-1]})
    both.owner = {"a.gate.weight": 0, "b.gate.weight": 0}
    assert Routing.of(both, made()).differs(made())


@pytest.mark.parametrize(
    ("routes", "told"),
    [
        ({}, "no router was observed to choose"),
        ({"x": OWN, "y": OWN}, "2 routers chose where the reference has a.gate"),
        ({"x": OWN * 2}, "x chose 4 times in 2 microbatches, and the reference's a.gate 1 time in each"),
        ({"x": [one[:2] for one in OWN]}, "x chose 1 for each of 2 tokens, and the reference 1 for each of 3"),
        ({"x": [one + 1 for one in OWN]}, "x chose number 3, and the reference among 3"),
    ],
)
def test_what_does_not_fit_is_said(routes: dict[str, list[torch.Tensor]], told: str) -> None:
    routing = Routing.of(found(routes, {"router": OWN}), made())
    assert routing.reason.startswith(told)
    assert routing.reason.endswith(" on rank 0")
    assert [*routing.ranks] == [1], "of others all is compared"


def test_a_router_may_choose_for_some_microbatches_alone() -> None:
    expected = made()
    expected[0] = SimpleNamespace(choices={"b.gate": expected[0].choices["b.gate"]})
    routing = Routing.of(found({"router": OWN[1:]}, {"router": OWN}), expected)
    assert (routing.reason, [*routing.ranks[0]]) == ("", [Routed(0, "a.gate", 1)])
    assert not routing.differs(expected)
    more = Routing.of(found({"router": OWN}, {"router": OWN}), expected)
    golden(more.reason)


# The order of tokens on ranks, told by where they go.

TOKENS = 24
EXPERTS = torch.randint(8, (TOKENS, 2), generator=torch.Generator().manual_seed(0))
GROUPS = torch.arange(2 * TOKENS).view(-1, 1)  # two choices for each token before that
KEPT = torch.tensor([[0, 5, 23]])  # tokens that an expert keeps
CHOICES = [
    *(Choice(torch.zeros(len(own), 48).scatter(1, own, 1.0), own, own) for own in (GROUPS, EXPERTS)),
    Choice(torch.zeros(1, TOKENS), KEPT, KEPT, of_tokens=False),
]
EVERY = torch.arange(TOKENS)
SEQUENCE_FIRST = EVERY.view(4, 6).T.flatten()  # which of the reference's tokens is where


def chosen(order: Tensor, *, count: int = 3) -> list[Route]:
    """What is chosen where the tokens are in this order."""
    every = [GROUPS.view(TOKENS, 2)[order].view(-1, 1), EXPERTS[order], order.argsort()[KEPT]]
    return [Route(one, torch.float32) for one in every[:count]]


@pytest.mark.parametrize("order", [EVERY, SEQUENCE_FIRST, EVERY.view(2, 12).T.flatten()])
def test_rows_or_sequences_may_come_first(order: Tensor) -> None:
    found = in_own_order(chosen(order), CHOICES)
    assert found is not None
    assert all(torch.equal(one.chosen_TK, choice.own_TK) for one, choice in zip(found, CHOICES, strict=True))


@pytest.mark.parametrize("order", [EVERY, SEQUENCE_FIRST, EVERY.view(4, 2, 3).transpose(0, 1).flatten()])
def test_parts_are_put_together(order: Tensor) -> None:
    halves = [{"gate": [Route(EXPERTS[part], torch.float32)]} for part in order.chunk(2)]
    (whole,) = join_routes(halves)["gate"]
    found = in_own_order([whole], CHOICES[1:2], parts=2)
    assert torch.equal(found[0].chosen_TK, EXPERTS)


def test_among_nearly_equal_experts_tokens_stay() -> None:
    """Where few tokens change theirs by rounding, by chance another order may be nearer to the reference."""
    scores = torch.ones(TOKENS, 48).scatter(1, EXPERTS, 1 + 1e-7)
    own = chosen(SEQUENCE_FIRST)[1:2]
    assert in_own_order(own, [Choice(scores, EXPERTS, EXPERTS)]) == own


def test_an_order_that_hides_is_not_guessed() -> None:
    mixed = chosen(torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1)), count=2)
    assert in_own_order(mixed, CHOICES[:2]) == mixed, "whole, it may be wrong"
    assert in_own_order(mixed, CHOICES[:2], parts=2) is None, "in parts, nobody knows"
    assert in_own_order(chosen(SEQUENCE_FIRST), CHOICES, parts=2) is None, "experts chose among the tokens of a part"
