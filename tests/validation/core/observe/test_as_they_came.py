"""What flows to a module is noted as it came, and not as hooks on the module leave it."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.observe.sketch import sketch
from pipeproof.core.observe.watching import watch, watching


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int, Tensor]:
        return torch.sin(x), 3, torch.cos(x)


def halved(module: nn.Module, flows: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else one / 2 for one in flows)


def written_to(module: nn.Module, flows: Sequence[Tensor | None]) -> None:
    for one in flows:
        if one is not None:
            one.zero_()


@pytest.mark.parametrize("hook", [halved, written_to])
def test_hooks_of_the_module_come_after(hook: object) -> None:
    draw, module = torch.Generator().manual_seed(0), Two()
    module.register_full_backward_pre_hook(hook)  # type: ignore[arg-type]
    given, *flows = (torch.randn(4, generator=draw) for _ in range(5))
    with watching() as watcher:
        watch(module)
        made = [module(given.clone().requires_grad_()) for _ in range(2)]
        expected = [sketch(one).digest for one in flows]
        for k in (1, 0):
            torch.autograd.backward(made[k][::2], flows[2 * k : 2 * k + 2])
        calls = watcher.calls(module) or []
    assert [call.output_gradients[n].digest for call in calls for n in (0, 1)] == expected
