"""What crosses a stage boundary: specs, layouts, and messages that come back as they went."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeproof.pipeline.boundary import (
    BoundaryError,
    TensorSpec,
    activations,
    as_tensors,
    decode_specs,
    encode_specs,
    gradients,
    signature,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


def specs_of(tensors: tuple[Tensor, ...]) -> tuple[TensorSpec, ...]:
    return tuple(map(TensorSpec.of, tensors))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 9).to(
        draw(st.sampled_from(DTYPES))
    )
    order = draw(st.permutations(range(tensor.dim())))
    return tensor.permute(order)


@given(st.lists(tensors(), min_size=1, max_size=4).map(tuple))
def test_activations_arrive_as_they_went_with_their_strides(sent: tuple[Tensor, ...]) -> None:
    specs = specs_of(sent)
    buffer = activations(specs).pack(sent)
    assert buffer.dtype is torch.uint8
    assert buffer.dim() == 1
    assert len(buffer) == activations(specs).nbytes
    for tensor, spec, arrived in zip(sent, specs, activations(specs).unpack(buffer.clone()), strict=True):
        assert torch.equal(arrived, tensor)
        assert arrived.dtype is tensor.dtype
        assert arrived.stride() == spec.stride


@given(st.lists(tensors(), min_size=1, max_size=4).map(tuple), st.data())
def test_gradients_arrive_and_a_missing_one_stays_missing(members: tuple[Tensor, ...], data: st.DataObject) -> None:
    leaves = tuple(t.detach().requires_grad_(t.is_floating_point() and data.draw(st.booleans())) for t in members)
    specs = specs_of(leaves)
    sent = tuple(t.detach() if t.requires_grad and data.draw(st.booleans()) else None for t in leaves)
    layout = gradients(specs)
    if not any(spec.requires_grad for spec in specs):
        assert layout.nbytes == 0
        return
    arrived = layout.unpack(layout.pack(sent).clone())
    for one, other in zip(sent, arrived, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def test_a_single_activation_is_sent_without_a_copy() -> None:
    tensor = torch.randn(4, 5)
    assert activations(specs_of((tensor,))).pack((tensor,)).data_ptr() == tensor.data_ptr()


def test_specs_survive_the_header() -> None:
    sent = (torch.randn(2, 3, requires_grad=True), torch.arange(4), torch.randn(3, 5).t())
    header = encode_specs(specs_of(sent))
    assert len(header) == 4096
    assert decode_specs(header) == specs_of(sent)


def test_too_many_members_for_a_header_are_refused() -> None:
    with pytest.raises(BoundaryError, match="hands on 400 tensors"):
        encode_specs(specs_of(tuple(torch.zeros(1) for _ in range(400))))


def test_a_contiguous_tensor_with_odd_strides_has_the_plain_spec() -> None:
    odd = torch.zeros(6).as_strided((1, 6), (17, 1))
    assert odd.is_contiguous()
    assert TensorSpec.of(odd) == TensorSpec.of(torch.zeros(1, 6))


def test_signature_tells_shapes_and_types_apart_but_not_values() -> None:
    assert signature((torch.zeros(2),)) == signature((torch.ones(2),))
    assert signature((torch.zeros(2),)) != signature((torch.zeros(3),))
    assert signature((torch.zeros(2),)) != signature((torch.zeros(2, dtype=torch.int64),))
    assert signature((torch.zeros(2, 3).t(),)) != signature((torch.zeros(3, 2),))


def test_conjugated_and_negated_views_are_sent_as_the_numbers_they_show() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    for view in (tensor.conj(), tensor.conj().imag):
        arrived = activations(specs_of((view,))).unpack(activations(specs_of((view,))).pack((view,)))
        assert torch.equal(arrived[0], view)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"x": torch.zeros(1)}, "dict"),
        ((torch.zeros(1), 3), "tuple of Tensor, int"),
        ((), "tuple of nothing"),
        (1.5, "float"),
    ],
)
def test_what_is_no_tuple_of_tensors_is_refused_by_name(value: object, kind: str) -> None:
    with pytest.raises(BoundaryError, match=f"the output of stage 3 is a {kind}: expected a tensor, or a tuple"):
        as_tensors(value, "the output of stage 3")
