"""What ranks' routers chose, paired with the routers and microbatches of the reference."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeproof.core.tolerance import Floor
from pipeproof.foreign.routing import Routing
from pipeproof.observers.observed import Routed
from pipeproof.observers.routes import Route
from pipeproof.reference.choices import Choice
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


def test_routers_are_paired_stage_by_stage_whatever_they_are_called() -> None:
    routing = Routing.of(found({"router": OWN}, {"": OWN}), made())
    assert {rank: [*own] for rank, own in routing.ranks.items()} == {
        0: [Routed(0, "a.gate", 0), Routed(0, "a.gate", 1)],
        1: [Routed(1, "b.gate", 0), Routed(1, "b.gate", 1)],
    }
    assert not routing.untold
    assert not routing.differs(made())
    flipped = Routing.of(found({"router": OWN}, {"": [OWN[0], OWN[1].flip(0)]}), made())
    assert flipped.differs(made())
    assert [sorted(told) for told in flipped.told(2)] == [["a.gate", "b.gate"]] * 2


def test_from_a_wrong_choice_on_the_reference_goes_by_its_own_scores() -> None:
    wrong = [OWN[0], OWN[1].flip(0)]
    both = found({"first": wrong, "second": wrong})
    both.owner = {"a.gate.weight": 0, "b.gate.weight": 0}
    routing = Routing.of(both, made()).with_wrong(made(), lambda microbatch, router, choice: Floor(0.0, 1e-7, 1.0))
    assert routing.wrong == {("a.gate", 1)}
    kept = {Routed(0, "a.gate", 0), Routed(0, "a.gate", 1), Routed(0, "b.gate", 0)}
    assert {*routing.ranks[0]} == kept, "what a later router chose follows from it"
    assert [sorted(told) for told in routing.told(2)] == [["a.gate", "b.gate"], []]
    assert not routing.differs(made())


def test_microbatches_in_another_order_are_known_by_where_their_tokens_go() -> None:
    routing = Routing.of(found({"router": OWN[::-1]}, {"router": OWN}), made())
    assert not routing.differs(made())
    shared = Routing.of(found({"router": [OWN[1]]}, {"router": [OWN[1]]}, share=(1,)), made())
    assert [*shared.ranks[0]] == [Routed(0, "a.gate", 1)]
    alike = Routing.of(found({"router": [OWN[0], OWN[0]]}, {"router": OWN}), made())
    assert alike.differs(made()), "two are not one: they stay as they come"


def test_where_one_router_of_a_stage_alone_is_in_another_order_tokens_are_in_wrong_places() -> None:
    both = found({"first": OWN, "second": OWN[::-1]})
    both.owner = {"a.gate.weight": 0, "b.gate.weight": 0}
    assert Routing.of(both, made()).differs(made())


@pytest.mark.parametrize(
    ("routes", "told"),
    [
        ({}, "no router was seen to choose"),
        ({"x": OWN, "y": OWN}, "2 routers chose where the reference has a.gate"),
        ({"x": OWN * 2}, "x chose 4 times in 2 microbatches, and the reference's a.gate 1 time in each"),
        ({"x": [one[:2] for one in OWN]}, "x chose 1 for each of 2 tokens, and the reference 1 for each of 3"),
        ({"x": [one + 1 for one in OWN]}, "x chose number 3, and the reference among 3"),
    ],
)
def test_what_does_not_fit_is_left_out_and_said(routes: dict[str, list[torch.Tensor]], told: str) -> None:
    routing = Routing.of(found(routes, {"router": OWN}), made())
    assert routing.untold.startswith(told)
    assert routing.untold.endswith(" on rank 0")
    assert [*routing.ranks] == [1], "of others all is compared"


def test_a_router_may_choose_for_some_microbatches_alone() -> None:
    due = made()
    due[0] = SimpleNamespace(choices={"b.gate": due[0].choices["b.gate"]})
    routing = Routing.of(found({"router": OWN[1:]}, {"router": OWN}), due)
    assert (routing.untold, [*routing.ranks[0]]) == ("", [Routed(0, "a.gate", 1)])
    assert not routing.differs(due)
    more = Routing.of(found({"router": OWN}, {"router": OWN}), due)
    golden(more.untold)
