"""Copies of gradients: bit for bit, of any type, None where there is none."""

import torch
from torch import nn

from validation.snapshot import gradients, parameters, versions


def named() -> list[tuple[str, nn.Parameter]]:
    one, two, three = (nn.Parameter(torch.full(shape, 2.0)) for shape in ((2, 3), (), (4,)))
    wide = nn.Parameter(torch.arange(3, dtype=torch.float64))
    one.grad, two.grad, wide.grad = torch.full((2, 3), float("nan")), torch.tensor(-0.0), torch.ones(3).double()
    return [("one", one), ("two", two), ("three", three), ("wide", wide)]


def test_a_snapshot_gives_back_what_there_was_though_it_changes_later() -> None:
    held = named()
    seen = gradients(held)
    for _, parameter in held:
        if parameter.grad is not None:
            parameter.grad.fill_(9.0)
    found = seen.tensors()
    assert found["three"] is None
    assert found["one"] is not None
    assert found["one"].shape == (2, 3)
    assert found["one"].isnan().all()
    assert found["two"] is not None
    assert torch.signbit(found["two"])
    assert found["wide"] is not None
    assert (found["wide"].dtype, found["wide"].tolist()) == (torch.float64, [1.0, 1.0, 1.0])
    three = parameters(held).tensors()["three"]
    assert three is not None
    assert three.tolist() == [2.0] * 4


def test_writes_are_seen_by_their_count() -> None:
    held = named()
    before = versions(held)
    assert versions(held) == before
    assert held[0][1].grad is not None
    held[0][1].grad.mul_(1.0)
    assert versions(held) != before
    held[2][1].grad = torch.zeros(4)
    assert versions(held)[2] is not None
