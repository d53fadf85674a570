"""What one module alone paired, told from its parameter's gradient."""

import torch
from torch import Tensor

from pipeproof.diagnosis.module_pairing import Paired, paired_within

COUNT, ROWS, WIDTH, LIMIT = 4, 6, 8, 1e-6


def pairs() -> dict[tuple[int, int], Tensor]:
    draw = torch.Generator().manual_seed(0)
    inputs, flows = (torch.randn(COUNT, ROWS, WIDTH, generator=draw).double() for _ in range(2))
    return {(i, j): flows[j].T @ inputs[i] for i in range(COUNT) for j in range(COUNT)}


def gradient(*chosen: tuple[int, int]) -> Tensor:
    known = pairs()
    return torch.stack([known[pair] for pair in chosen]).sum(dim=0).float()


def test_a_late_activation_is_told() -> None:
    found = paired_within(gradient((1, 0), (2, 1), (3, 2), (3, 3)), pairs(), COUNT, LIMIT)
    assert found == Paired(((1, 0), (2, 1), (3, 2), (3, 3)), COUNT)
    assert found.wrong == ((1, 0), (2, 1), (3, 2))
    assert found.kinds == ("swapped-activations",)


def test_an_output_gradient_used_twice_is_told() -> None:
    found = paired_within(gradient((0, 0), (1, 0), (2, 2), (3, 3)), pairs(), COUNT, LIMIT)
    assert found is not None
    assert found.kinds == ("swapped-gradients",)


def test_of_an_exchange_nobody_knows_which_side_it_was() -> None:
    found = paired_within(gradient((0, 1), (1, 0), (2, 2), (3, 3)), pairs(), COUNT, LIMIT)
    assert found is not None
    assert found.kinds == ("swapped-activations", "swapped-gradients")


def test_what_is_no_such_sum_is_not_told() -> None:
    right = gradient((0, 0), (1, 1), (2, 2), (3, 3))
    assert paired_within(right + 0.01 * torch.randn_like(right), pairs(), COUNT, LIMIT) is None
    assert paired_within(1.5 * right, pairs(), COUNT, LIMIT) is None
    assert paired_within(right * float("nan"), pairs(), COUNT, LIMIT) is None
    assert paired_within(right, {}, COUNT, LIMIT) is None


def test_microbatches_that_are_alike_are_not_told_apart() -> None:
    same = {(i, j): pairs()[min(i, 1), j] for i in range(COUNT) for j in range(COUNT)}
    assert paired_within(gradient((0, 0), (1, 1), (1, 2), (1, 3)), same, COUNT, LIMIT) is None
