"""Copies of gradients: bit for bit, of any type, None where there is none."""

import torch
from torch import nn

from validation.observers.snapshot import Mark, Snapshot, gradients, parameters


def named() -> list[tuple[str, nn.Parameter]]:
    one, two, three = (nn.Parameter(torch.full(shape, 2.0)) for shape in ((2, 3), (), (4,)))
    wide = nn.Parameter(torch.arange(3, dtype=torch.float64))
    one.grad, two.grad, wide.grad = torch.full((2, 3), float("nan")), torch.tensor(-0.0), torch.ones(3).double()
    return [("one", one), ("two", two), ("three", three), ("wide", wide)]


def test_a_snapshot_gives_back_what_there_was_though_it_changes_later() -> None:
    held = named()
    seen = Snapshot.of(gradients(held))
    for _, parameter in held:
        if parameter.grad is not None:
            parameter.grad.fill_(9.0)
    found = seen.tensors(held)
    assert found["three"] is None
    assert found["one"] is not None
    assert found["one"].shape == (2, 3)
    assert found["one"].isnan().all()
    assert found["two"] is not None
    assert torch.signbit(found["two"])
    assert found["wide"] is not None
    assert (found["wide"].dtype, found["wide"].tolist()) == (torch.float64, [1.0, 1.0, 1.0])
    three = parameters(held).tensors(held)["three"]
    assert three is not None
    assert three.tolist() == [2.0] * 4


def test_a_single_tensor_is_copied_too() -> None:
    one = nn.Parameter(torch.ones(3))
    one.grad = torch.ones(3)
    seen = Snapshot.of(gradients([("one", one)]))
    one.grad.zero_()
    found = seen.tensors([("one", one)])["one"]
    assert found is not None
    assert found.tolist() == [1.0] * 3


def test_a_mark_stands_until_a_gradient_is_written_to_or_changed_for_another() -> None:
    held = named()
    mark = Mark.of(gradients(held))
    assert mark.stands(gradients(held))
    one = held[0][1]
    assert one.grad is not None
    one.grad.mul_(1.0)
    assert not mark.stands(gradients(held))
    for other in (torch.zeros(4), None, torch.zeros(4)):  # nothing was written to any of them
        mark = Mark.of(gradients(held))
        held[2][1].grad = other
        assert not mark.stands(gradients(held))
