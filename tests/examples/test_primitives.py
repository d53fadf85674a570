"""Each kind of parallelism is right alone and stacked, and bugs in each are caught and named."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.whitebox import WhiteBox
from pipeproof.wings.primitives.layers import Layers
from pipeproof.wings.primitives.stacked import PARTS, reference_of, step_of, validate_stack
from pipeproof.wings.primitives.stacks import Stack, smallest_stack
from tests.support.primitives import SEEDS, Step, all_held, is_caught, planted
from tests.support.sweeps import some

STACKS = {
    **{name: Stack.parse(smallest_stack(name)) for name in PARTS},
    "pp, ddp": Stack({"pp": 2, "dp": 2}, ("ddp",)),
    "pp, zero-1": Stack({"pp": 2, "dp": 2}, ("zero-1",)),
    "pp, zero-3": Stack({"pp": 2, "fsdp": 2}, ("zero-3",)),
    "pp, tp": Stack({"pp": 2, "tp": 2}, ("tp",)),
    "pp, tp, a split backward": Stack({"pp": 2, "tp": 2}, ("tp",), schedule="zb-h1"),
    "pp, tp-by-hand, a loop": Stack({"pp": 2, "tp": 2}, ("tp-by-hand",), schedule="interleaved", virtual=2),
    "pp, ep": Stack({"pp": 2, "ep": 2}, ("ep",)),
    "pp, cp": Stack({"pp": 2, "cp": 2}, ("cp",)),
    "pp, recompute": Stack({"pp": 2}, ("recompute",), dropout=0.2),
    "pp, ddp, tp": Stack({"pp": 2, "dp": 2, "tp": 2}, ("tp", "ddp")),
    "recompute-reentrant, zero-3": Stack({"fsdp": 2}, ("recompute-reentrant", "zero-3"), dropout=0.2),
    "ring, ddp": Stack({"dp": 2, "cp": 2}, ("ring", "ddp")),
}
MORE = {
    **{
        f"{name}, dropout": Stack({}, (name,), dropout=0.2)
        for name in ("recompute", "recompute-reentrant", "recompute-selective", "recompute-attention")
    },
    "pp, recompute-reentrant": Stack({"pp": 2}, ("recompute-reentrant",), dropout=0.2),
    "recompute, ddp": Stack({"dp": 2}, ("recompute", "ddp"), dropout=0.2),
    "recompute, zero-3": Stack({"fsdp": 2}, ("recompute", "zero-3"), dropout=0.2),
    "recompute-selective, zero-2": Stack({"fsdp": 2}, ("recompute-selective", "zero-2")),
    "tp, recompute": Stack({"tp": 2}, ("tp", "recompute")),
    "ep, recompute": Stack({"ep": 2}, ("ep", "recompute")),
    "cp, recompute-attention": Stack({"cp": 2}, ("cp", "recompute-attention")),
    "pp, tp-by-hand": Stack({"pp": 2, "tp": 2}, ("tp-by-hand",)),
    "pp, sp-by-hand": Stack({"pp": 2, "sp": 2}, ("sp-by-hand",)),
    "tp-by-hand of 4": Stack({"tp": 4}, ("tp-by-hand",)),
    "sp-by-hand, ddp": Stack({"dp": 2, "sp": 2}, ("sp-by-hand", "ddp")),
    "tp-by-hand, recompute": Stack({"tp": 2}, ("tp-by-hand", "recompute")),
    "pp, ring-zigzag": Stack({"pp": 2, "cp": 2}, ("ring-zigzag",)),
    "ring of 4": Stack({"cp": 4}, ("ring",)),
    "ring-zigzag of 4": Stack({"cp": 4}, ("ring-zigzag",)),
    "ep, tp": Stack({"ep": 2, "tp": 2}, ("tp", "ep")),
    "pp, zero-3, tp": Stack({"pp": 2, "fsdp": 2, "tp": 2}, ("tp", "zero-3")),
}
UNEVEN = {  # replicas have unequal shares
    "uneven ddp": replace(Stack.parse("ddp=2"), microbatches=3),
    "uneven ddp of 4": Stack({"dp": 4}, ("ddp",), microbatches=7),
    "uneven pp, ddp": Stack({"pp": 2, "dp": 2}, ("ddp",), microbatches=5),
    "uneven tp, ddp": Stack({"dp": 2, "tp": 2}, ("tp", "ddp"), microbatches=3),
    "uneven ddp, ring": Stack({"dp": 2, "cp": 2}, ("ring", "ddp"), microbatches=3),
}
RUN = {**STACKS, **MORE, **UNEVEN}
SHOWN = ("pp, tp", "pp, ddp, tp", "pp, zero-1", "pp, ep", "recompute-reentrant, zero-3")  # by others on as many ranks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", some(RUN, left=[*MORE, *SHOWN, *UNEVEN]))
def test_what_is_right_passes(whitebox: WhiteBox, kind: str, seed: int) -> None:
    stack = RUN[kind]
    verdict = validate_stack(replace(stack, seed=seed), whitebox)
    assert verdict.outcome == "pass", verdict
    assert all_held(verdict, stack)


UNUSED = {
    "static, spare": Stack({"dp": 2}, ("ddp-static",), blocks="spare"),
    "spare": Stack({"dp": 2}, ("ddp-unused",), blocks="spare"),
    "optional": Stack({"dp": 2}, ("ddp-unused",), blocks="optional"),
    "pp, spare": Stack({"pp": 2, "dp": 2}, ("ddp-unused",), blocks="spare"),
    "pp, optional": Stack({"pp": 2, "dp": 2}, ("ddp-unused",), blocks="optional"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", some(UNUSED, left=["pp, spare"]))
def test_what_some_microbatches_or_none_of_them_use_passes(whitebox: WhiteBox, kind: str, seed: int) -> None:
    stack = UNUSED[kind]
    verdict = validate_stack(replace(stack, seed=seed), whitebox)
    assert verdict.outcome == "pass", verdict
    assert verdict.law("presence").checked == len(list(reference_of(stack)().parameters()))
    assert 0 < verdict.law("gradient").checked < verdict.law("presence").checked


def with_equal_biases() -> nn.Module:
    """All biases begin as zero, so that their weights do not tell them apart."""
    model = reference_of(STACKS["ep"])()
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return model


@pytest.mark.sweep
def test_modules_of_the_steps_own_are_told_by_what_they_hold(whitebox: WhiteBox) -> None:
    """Both ranks call their experts 0 and 1."""
    right = step_of(STACKS["ep"])
    verdict = validate_stack(
        STACKS["ep"],
        whitebox,
        step=lambda model, given: right(copy.deepcopy(model), given),
        reference=with_equal_biases,
    )
    assert verdict.outcome == "pass", verdict
    assert all_held(verdict, STACKS["ep"], with_equal_biases)


def averaged(right: Step) -> Step:
    def reduced(name: str, parameter: nn.Parameter, group: Any) -> None:
        right(name, parameter, group)
        parameter.grad /= dist.get_world_size(group)

    return reduced


def skipped(*names: str, ranks: tuple[int, ...] = ()) -> Callable[[Step], Step]:
    """Gradients whose names end so are not reduced, on these ranks or on all."""

    def fault(right: Step) -> Step:
        def reduced(name: str, parameter: nn.Parameter, group: Any) -> None:
            if not name.endswith(names) or (ranks and dist.get_rank() not in ranks):
                right(name, parameter, group)

        return reduced

    return fault


def of_torch(right: Step) -> Step:
    """Its backward is wrong under gloo where a gradient is not contiguous, as these are (torch 2.13)."""
    from torch.distributed.nn.functional import all_gather

    return lambda part, group, dim: (
        torch.cat(all_gather(part.contiguous()), dim) if dim > 1 else right(part, group, dim)
    )


def multiplied(words: str, by: Callable[[], float]) -> Callable[[Step], Step]:
    """When the step is over, gradients of which the name has these words are multiplied."""

    def fault(right: Step) -> Step:
        def step(model: Layers, given: list) -> Any:
            found = right(model, given)
            for name, parameter in model.named_parameters():
                if words in name:
                    parameter.grad *= by()
            return found

        return step

    return fault


def mean_for_sum(right: Step) -> Step:
    """Of what the ranks hand back of a branch; the residual stream beside it stays right."""

    def step(model: Layers, given: list) -> Any:
        model[2].norm.register_forward_hook(lambda _, __, out: out.register_hook(lambda g: g / 2) and None)
        return right(model, given)

    return step


Fault = tuple[str, str, Callable[[Step], Step], str, str]
FAULTS: dict[str, Fault] = {  # of which stack, where (or around the step) and what, its cause, and what is told of it
    "router not reduced": (
        "ep", "collectives.reduce_gradient", skipped("router.weight"), "not-reduced",
        "rank 0 lacks microbatches 1, 3; rank 1 lacks",
    ),
    "experts times ranks": ("ep", "", multiplied("experts", dist.get_world_size), "scale", "2 = the number of ranks"),
    "experts in another order": (
        "ep", "experts.compute",
        lambda right: lambda experts, came, counts: torch.cat(right(experts, came, counts).split(counts)[::-1]),
        "computation",
        "every loss is wrong, and none is another microbatch's",
    ),
    "parts not reduced": (
        "cp", "collectives.reduce_gradient", skipped(""), "not-reduced", "ranks 0, 1 each keep their own part: the sum",
    ),
    "mean of parts": ("cp", "collectives.reduce_gradient", averaged, "scale", "1/2 = 1 / the number of ranks"),
    "a rank's gradient for that of all": (
        "cp", "collectives.sum_over", lambda right: lambda gradient, group: gradient, "",
        "unknown: the evidence does not decide",
    ),
    "mask of the first part": (
        "cp", "context.visible", lambda right: lambda at, every: right(at - at[0], every), "computation",
        "or its inputs or targets are not its own",
    ),
    "torch's gather": ("cp", "context.gather", of_torch, "", "unknown: the evidence does not decide"),
    "bias on each": (
        "tp", "", multiplied("feedforward.down.bias", lambda: 2), "scale", "1.feedforward.down.bias: 2 times",
    ),
    "mean for sum": ("tp", "", mean_for_sum, "computation", "the input of 2.feedforward.up is multiplied by 0.5"),
    "one not reduced": (
        "pp, ddp, tp", "collectives.reduce_gradient", skipped("0.positions.weight", ranks=(0, 2)), "not-reduced",
        "2 lacks microbatches 0, 2",
    ),
}  # fmt: skip
COSTLY = ("experts times ranks", "experts in another order", "mean of parts", "torch's gather", "one not reduced")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", some(FAULTS, left=COSTLY))
def test_a_bug_is_caught(whitebox: WhiteBox, fault: str) -> None:
    kind, at, change, cause, told = FAULTS[fault]
    verdict = validate_stack(STACKS[kind], whitebox, step=planted(step_of(STACKS[kind]), at, change))
    assert is_caught(verdict, cause, told), verdict
    assert verdict.mismatches[0].rank == 0, verdict
