"""A stage that nothing explains, and whose gradients were added to those of another, as by hooks bound to the last."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pipeproof.explain.atoms import Explanation
from pipeproof.explain.mixed_gradients import find_mixed

DRAW = torch.Generator().manual_seed(0)
EXPECTED = {(stage, f"{stage}.{name}"): torch.randn(6, 6, generator=DRAW) for stage in range(2) for name in "abc"}


def named(**ours: Tensor) -> list[tuple[str, int | None, str]]:
    """What is told of stage 0, which has this in place of what is expected."""
    stages = [
        Explanation(0, {}, 1.0, 1e-6, explained=False, names=("0.a", "0.b", "0.c")),
        Explanation(1, {}, 1.0, 1e-6, explained=False),
    ]
    observed = EXPECTED | {(0, f"0.{name}"): one for name, one in ours.items()}
    now = SimpleNamespace(
        stages=2, parameters=lambda stage: {name: one for (s, name), one in EXPECTED.items() if s == stage}
    )
    update: Any = SimpleNamespace(observed=observed, expected=EXPECTED, now=now)
    return [(one.kind, one.stage, one.detail) for one in find_mixed(stages, update)[0]]


def both(name: str) -> Tensor:
    return EXPECTED[0, f"0.{name}"] + EXPECTED[1, f"1.{name}"]


def test_all_that_is_wrong_in_a_stage_is_so_much_of_its_own_and_of_another() -> None:
    (found,) = named(a=both("a"), b=both("b"))
    told = [f"0.{name}: 1 of its own gradient and 1 of the gradient of 1.{name}, stage 1" for name in "ab"]
    assert found == ("extra-term", 0, "; ".join(told))


def test_where_one_gradient_is_nothing_known_none_is_told() -> None:
    assert named(a=both("a"), b=torch.randn(6, 6, generator=DRAW)) == []
