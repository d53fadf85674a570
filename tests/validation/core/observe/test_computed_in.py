"""In which type modules compute: as what they give out, by autocast, and cast by hand on the way."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeproof.core.observe.computed_in import ComputedIn


class Cast(nn.Module):
    """Computes in bf16, and gives out fp32. ``how`` it is called from another."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), inner

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            return torch.tanh(self.inner(x=x))
        return nn.functional.linear(x.bfloat16(), self.linear.weight.bfloat16()).float()


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.half()

    @staticmethod
    def backward(ctx: object, *given: Tensor) -> Tensor:
        return given[0].float()


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Half.apply(super().forward(x)).float()  # type: ignore[no-any-return]


class Again(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("module", "narrowest"),
    [
        (nn.Linear(4, 4), "float32"),
        (nn.Linear(4, 4).bfloat16(), "bfloat16"),
        (Cast(), "bfloat16"),
        (Cast(Cast()), "bfloat16"),
        (nn.Sequential(nn.Linear(4, 4), Cast(), nn.Tanh()), "bfloat16"),
        (Own(4, 4), "float16"),
        (Again(4, 4), "float32"),
    ],
    ids=["plain", "weights", "by hand", "inside", "among others", "a function", "a checkpoint"],
)
def test_the_type_with_the_least_digits_is_told(module: nn.Module, narrowest: str) -> None:
    dtype = next(module.parameters()).dtype
    with ComputedIn([module]) as computed:
        for _ in range(2):
            module(torch.ones(2, 4, dtype=dtype)).sum().backward()
    assert computed.narrowest == narrowest
    assert not module._forward_hooks


def test_what_is_computed_before_a_module_is_not_its_own() -> None:
    first, second = Cast(), nn.Linear(4, 4)
    with ComputedIn([second]) as computed:
        second(first(torch.ones(2, 4))).sum().backward()
    assert computed.narrowest == "float32"
