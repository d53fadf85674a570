"""What a sketch is in place of the one that is expected, and which of several it was made of."""

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.sketch import sketch
from pipeproof.explain.sketches import nearest_sketch, of_sketches, recognise


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (6, 8)), generator=torch.Generator().manual_seed(seed))


KNOWN = {number: sketch(drawn(number)) for number in range(4)}


@pytest.mark.parametrize(
    ("observed", "kind"),
    [
        (drawn(2).half().float(), "rounded"),
        (drawn(2) * -3, "multiple"),
        (drawn(2).flip(0), "reordered"),
        (drawn(2).T, "reordered"),
    ],
    ids=["rounded", "multiple", "rows", "transposed"],
)
def test_a_change_is_named_and_leaves_its_tensor_known(observed: Tensor, kind: str) -> None:
    found = of_sketches(sketch(observed), KNOWN[2])
    assert found.kind == kind
    assert recognise(sketch(observed), KNOWN) == {2}


def test_what_is_near_one_alone_is_known_again_and_what_is_near_all_is_not() -> None:
    assert recognise(sketch(drawn(2) + 0.1 * drawn(9)), KNOWN) == {2}
    common = 10 * drawn(8)
    alike = {number: sketch(common + drawn(number)) for number in range(4)}
    assert nearest_sketch(sketch(common + drawn(9)), alike) is None
    assert nearest_sketch(sketch(common), alike) is None


@pytest.mark.parametrize(("factor", "kind"), [(0.99965, None), (1.0005, None), (0.99, "multiple"), (-1.0, "multiple")])
def test_a_factor_that_two_sketches_of_one_tensor_may_differ_by_is_none(factor: float, kind: str | None) -> None:
    found = of_sketches(sketch(drawn(2) * factor), KNOWN[2])
    assert (found and found.kind) == kind


def test_another_tensor_was_not_made_of_any() -> None:
    for seed in range(10, 60):
        assert recognise(sketch(drawn(seed)), KNOWN) == set()
    assert recognise(sketch(torch.zeros(6, 8)), KNOWN) == set()
    assert recognise(sketch(drawn(2) / 0), KNOWN) == set()


def test_elements_in_another_order_are_told_from_others_of_the_same_size() -> None:
    one = torch.nn.functional.layer_norm(drawn(0, 4, 64), (64,))
    other = torch.nn.functional.layer_norm(drawn(1, 4, 64), (64,))
    assert of_sketches(sketch(other), sketch(one)) is None
    assert of_sketches(sketch(one.flip(1)), sketch(one)) is not None
    assert of_sketches(sketch(one), sketch(one)) is None or sketch(one).is_like(sketch(one))
