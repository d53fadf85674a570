"""Looking at a tensor recognises it again, and leaves it as it was."""

import pytest
import torch
from torch import Tensor

from validation.observers.sketch import _signs, changed, digest, nearest, recognised, sketch


def test_equal_bits_have_equal_digests_and_others_have_not() -> None:
    one = torch.arange(6.0)
    assert digest(one) == digest(one.clone())
    assert len({digest(one), digest(one.view(2, 3)), digest(one.double()), digest(-one)}) == 4


def test_of_any_type_and_form_the_elements_are_known_in_another_order() -> None:
    one = torch.arange(1.0, 25.0).view(4, 6)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        seen, other = sketch(one.to(dtype).flip(0)), sketch(one.to(dtype))
        assert seen.is_reordered(other), dtype
        assert not other.is_reordered(other)
        assert not sketch((one + 1).to(dtype)).is_reordered(other)
    assert sketch(one.T).is_reordered(sketch(one))
    for tensor in (torch.tensor(1.0), torch.ones(0), torch.ones(1).expand(20), torch.ones(20, dtype=torch.bool)):
        assert not sketch(tensor).is_reordered(sketch(tensor))


def test_a_tensor_that_was_looked_at_can_still_be_freed() -> None:
    tensor = torch.ones(4)
    digest(tensor)
    sketch(tensor)
    tensor.untyped_storage().resize_(0)  # as fully_shard does after a forward
    assert tensor.untyped_storage().nbytes() == 0


def test_a_sketch_is_used_again_for_an_equal_tensor_alone() -> None:
    tensor = torch.arange(6.0)
    known = sketch(tensor)
    assert sketch(tensor.clone(), known=known) is known
    assert sketch(-tensor, known=known) == sketch(-tensor) != known


def test_what_is_kept_for_sketches_is_small_whatever_was_sketched() -> None:
    for size in (1, 1000, 65_521, 65_522, 500_000):
        sketch(torch.ones(size))
    assert _signs.cache_info().currsize == 1
    assert _signs(4, 65_521).nbytes < 300_000


@pytest.mark.parametrize("size", [100, 65_521, 65_522, 200_000])
def test_projections_tell_how_far_apart_two_tensors_are(size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    one = torch.randn(size, generator=draw)
    far = [sketch(one + 1e-3 * torch.randn(size, generator=draw)).distance(sketch(one)) for _ in range(20)]
    assert 0.8e-3 < sum(far) / len(far) < 1.2e-3
    assert sketch(2 * one).factor(sketch(one)) == pytest.approx(2)


def test_imaginary_parts_are_in_a_sketch() -> None:
    one = torch.tensor([1 + 1j, 2 - 1j])
    assert sketch(one.conj()).distance(sketch(one)) > 0.1
    assert sketch(one.conj().resolve_conj()) == sketch(one.conj())


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (6, 8)), generator=torch.Generator().manual_seed(seed))


KNOWN = {number: sketch(drawn(number)) for number in range(4)}


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (drawn(2).half().float(), "rounded"),
        (drawn(2) * -3, "multiple"),
        (drawn(2).flip(0), "reordered"),
        (drawn(2).T, "reordered"),
    ],
    ids=["rounded", "multiple", "rows", "transposed"],
)
def test_a_change_is_named_and_leaves_its_tensor_known(seen: Tensor, kind: str) -> None:
    found = changed(sketch(seen), KNOWN[2])
    assert found is not None
    assert found.kind == kind
    assert recognised(sketch(seen), KNOWN) == {2}


def test_what_is_near_one_alone_is_known_again_and_what_is_near_all_is_not() -> None:
    assert recognised(sketch(drawn(2) + 0.1 * drawn(9)), KNOWN) == {2}
    common = 10 * drawn(8)
    alike = {number: sketch(common + drawn(number)) for number in range(4)}
    assert nearest(sketch(common + drawn(9)), alike) is None
    assert nearest(sketch(common), alike) is None


def test_another_tensor_was_not_made_of_any() -> None:
    for seed in range(10, 60):
        assert recognised(sketch(drawn(seed)), KNOWN) == set()
    assert recognised(sketch(torch.zeros(6, 8)), KNOWN) == set()
    assert recognised(sketch(drawn(2) / 0), KNOWN) == set()


def test_elements_in_another_order_are_told_from_others_of_the_same_size() -> None:
    one = torch.nn.functional.layer_norm(drawn(0, 4, 64), (64,))
    other = torch.nn.functional.layer_norm(drawn(1, 4, 64), (64,))
    assert changed(sketch(other), sketch(one)) is None
    assert changed(sketch(one.flip(1)), sketch(one)) is not None
    assert changed(sketch(one), sketch(one)) is None or sketch(one).is_like(sketch(one))
