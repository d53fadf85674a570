"""Bugs in each way to recompute, cut tensors and sequences by hand, and reduce with DDP are caught.

Those with a cause are named. Of the others the verdict names none, and says where a tensor is first wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.whitebox import WhiteBox
from pipeproof.wings.primitives.collectives import join, own_part, paired, total
from pipeproof.wings.primitives.stacked import step_of, validate_stack
from pipeproof.wings.primitives.stacks import Stack, smallest_stack
from tests.support.primitives import Step, is_caught, planted
from tests.support.sweeps import some

STACKS = {
    "cp": Stack.parse(smallest_stack("cp")),
    "recompute": Stack({}, ("recompute",), dropout=0.2),
    "pp, recompute": Stack({"pp": 2}, ("recompute",), dropout=0.2),
    "reentrant": Stack({}, ("recompute-reentrant",), dropout=0.2),
    "selective": Stack({}, ("recompute-selective",), dropout=0.2),
    "attention": Stack.parse(smallest_stack("recompute-attention")),
    "tp": Stack.parse(smallest_stack("tp-by-hand")),
    "pp, tp": Stack({"pp": 2, "tp": 2}, ("tp-by-hand",)),
    "sp": Stack.parse(smallest_stack("sp-by-hand")),
    "zigzag": Stack.parse(smallest_stack("cp-zigzag")),
    "ring": Stack.parse(smallest_stack("ring")),
    "ring of 4": Stack({"cp": 4}, ("ring",)),
    "ring, zigzag": Stack.parse(smallest_stack("ring-zigzag")),
    "uneven ddp": replace(Stack.parse("ddp=2"), microbatches=3),
    "uneven pp, ddp": Stack({"pp": 2, "dp": 2}, ("ddp",), microbatches=3),
    "uneven ddp-every": replace(Stack.parse(smallest_stack("ddp-every")), microbatches=3),
    "unused, ddp": Stack({"dp": 2}, ("ddp",), blocks="optional"),
}


def drawn_anew(right: Step) -> Step:
    return lambda function, *given, **how: right(function, *given, **how | {"preserve_rng_state": False})


def overwritten(right: Step) -> Step:
    """What is kept to recompute from is a buffer that is used again."""

    def again(function: Callable[..., Any], x: Tensor, *more: Tensor, **how: Any) -> Any:
        buffer = x.clone()
        made = right(function, buffer, *more, **how)
        buffer.data.mul_(1.01)
        return made

    return again


def left_out(*names: str) -> Callable[[Step], Step]:
    def change(right: Step) -> Step:
        return lambda name, *given: None if name.endswith(names) else right(name, *given)

    return change


def mask_of_places(right: Step) -> Step:
    """The mask is that of parts in the order of the ranks."""

    def visible(at: Tensor, every: Tensor) -> Tensor:
        first = dist.get_rank() * len(at)
        return right(torch.arange(first, first + len(at)), torch.arange(len(every)))

    return visible


def gathered_by_torch(right: Step) -> Step:
    """Its backward is wrong under gloo where a gradient is not contiguous, as these are (torch 2.13)."""
    from torch.distributed.nn.functional import all_gather

    return lambda part, group, dim: (
        torch.cat(all_gather(part.contiguous()), dim) if dim > 1 else right(part, group, dim)
    )


def of_torch(right: Step, *, early: bool = False) -> Step:
    """torch's ``context_parallel``. It replaces a function by its name: who has it ``early`` keeps the one before."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    known = functional.scaled_dot_product_attention

    def attended(group: Any, at: Tensor, *given: Tensor) -> Tensor:
        mesh, some = DeviceMesh.from_group(group, "cpu"), torch.zeros(16)  # a buffer that it cuts up: it asks for one
        flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        with context_parallel(mesh, buffers=[some], buffer_seq_dims=[0]), flash:
            return (known if early else functional.scaled_dot_product_attention)(*given, is_causal=True)

    return attended


def joined(right: Step) -> Step:
    """DDP's join is for one backward a step: a replica without more sends zero for all that it has added up."""

    def accumulated(module: Any, *given: Any) -> Any:
        with module.join(divide_by_initial_world_size=False):
            return right(module, *given)

    return accumulated


def not_summed(right: Step) -> Step:
    """Megatron's f does nothing in the backward."""
    return lambda x, group: x.view_as(x)


def gradients_stay(right: Step) -> Step:
    """Keys and values go round, and their gradients do not."""
    return lambda block, group: [*right(block[:3], group), *block[3:]]


Fault = tuple[str, str, Callable[[Step], Step], str, str]
FAULTS: Mapping[str, Fault] = {  # of which stack, where, what, its cause, and what is told of it
    "drawn anew": ("recompute", "recompute.again", drawn_anew, "", "the backward first goes wrong at 2.feed"),
    "drawn anew, reentrant": ("reentrant", "recompute.again", drawn_anew, "", "first goes wrong at 2.feed"),
    "drawn anew, selective": ("selective", "recompute.again", drawn_anew, "", "first goes wrong at 2.feed"),
    "drawn anew in a pipeline": (
        "pp, recompute", "recompute.again", drawn_anew, "computation", "input gradient of microbatch 0 is no microbat",
    ),
    "queries in a buffer": ("attention", "recompute.again", overwritten, "", "goes wrong at 2.attention."),
    "kept in a buffer": ("recompute", "recompute.again", overwritten, "", "the backward first goes wrong at 2.fe"),
    "values detached": (  # as where a backward by hand returns None for them
        "attention", "recompute.again",
        lambda right: lambda function, *given, **how: right(function, *given[:2], given[2].detach(), **how),
        "missing", "also: 1.attention.values.weight",
    ),
    "f does not sum": (
        "tp", "tensor_by_hand.copy_in", not_summed, "not-reduced", "3.norm.weight: ranks 0, 1 each",
    ),
    "f does not sum, in a pipeline": (
        "pp, tp", "tensor_by_hand.copy_in", not_summed, "not-reduced", "3.norm.weight: ranks 2, 3 each",
    ),
    "g sums both ways": (  # Megatron's g sums in the backward, too
        "tp", "tensor_by_hand.sum_out", lambda right: partial(paired, total, total), "",
        "wrong at 2.feedforward.down.weight (s",
    ),
    "bias on each rank": (
        "tp", "tensor_by_hand.with_bias", lambda right: lambda x, bias: right(x, dist.get_world_size() * bias),
        "computation", "every loss is wrong",
    ),
    "tokens of others": (  # are not left to other ranks
        "tp", "tensor_by_hand.local_index",
        lambda right: lambda *given: (right(*given)[0], torch.ones_like(given[0], dtype=torch.bool)),
        "computation", "every loss is wrong",
    ),
    "largest logit of its own": (  # ranks subtract other numbers before they add up exponentials
        "tp", "tensor_by_hand.largest", lambda right: lambda logits, group: logits.max(1, keepdim=True).values,
        "computation", "every loss is wrong",
    ),
    "norms in parts": (
        "sp", "collectives.reduce_gradient", left_out("norm.weight", "norm.bias"), "not-reduced",
        "1.attention_norm.weight",
    ),
    "biases in parts": (
        "sp", "collectives.reduce_gradient", left_out("down.bias", "output.bias"), "not-reduced",
        "2.feedforward.down.bias",
    ),
    "gathered one way": (  # a rank takes its part of the gradient that it has itself
        "sp", "tensor_by_hand.gather", lambda right: partial(paired, join, own_part), "", "3.norm.bias (stage 0)",
    ),
    "mask of other places": ("zigzag", "context.visible", mask_of_places, "computation", "every loss is wrong"),
    "torch's, by an early import": (
        "zigzag", "context.attend_to_all", partial(of_torch, early=True), "computation", "every loss is wrong",
    ),
    "blocks not weighted": (  # what they give is added up as if each were all
        "ring", "ring.merge", lambda right: lambda one, other: (one[0] + other[0], right(one, other)[1]),
        "computation", "every loss is wrong",
    ),
    "mask left out": (
        "ring, zigzag", "ring.visible", lambda right: lambda at, every: at[:, None] > every - 99, "computation", "loss",
    ),
    "gradients of the last": (
        "ring", "ring.add", lambda right: lambda gradients, more: [*more], "", "first goes wrong at 2.attention",
    ),
    "gradients stay": ("ring", "ring.pass_on", gradients_stay, "", "first goes wrong at 2.attention.values"),
    "gradients stay, of 4": ("ring of 4", "ring.pass_on", gradients_stay, "", "2.attention.values.weight (stage 0)"),
    "torch's gather": ("cp", "context.gather", gathered_by_torch, "", "unknown: the evidence does not decide"),
    "own number": (  # each loss is divided by how many microbatches its own replica has
        "uneven ddp", "stacked.divisor_of", lambda right: lambda count, parts: count, "unequal-weights",
        "they have 2, 1 microbatches",
    ),
    "own number, in a pipeline": (
        "uneven pp, ddp", "stacked.divisor_of", lambda right: lambda count, parts: count, "unequal-weights",
        "everywhere: replicas count alike, though",
    ),
    "joined": ("uneven ddp-every", "stacked.accumulate", joined, "not-reduced", "rank 1 lacks microbatch 2"),
    # DDP that is not told so waits for gradients of what was not used, never reduces any, and says nothing.
    "parameters that may be unused": ("unused, ddp", "", lambda right: right, "not-reduced", "lacks microbatches"),
}  # fmt: skip


SIMILAR = (  # to others
    "drawn anew, reentrant",
    "drawn anew, selective",
    "drawn anew in a pipeline",
    "kept in a buffer",
    "f does not sum, in a pipeline",
    "largest logit of its own",
    "biases in parts",
    "gradients of the last",
    "gradients stay, of 4",
    "mask of other places",
    "gathered one way",
    "torch's, by an early import",
    "bias on each rank",
    "torch's gather",
    *("own number", "own number, in a pipeline", "joined", "parameters that may be unused"),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", some(FAULTS, left=SIMILAR))
def test_a_bug_in_a_primitive_is_caught(whitebox: WhiteBox, name: str) -> None:
    kind, at, change, cause, told = FAULTS[name]
    verdict = validate_stack(STACKS[kind], whitebox, step=planted(step_of(STACKS[kind]), at, change))
    assert is_caught(verdict, cause, told), verdict


@pytest.mark.sweep
def test_torchs_own_context_parallelism_has_no_attention_for_a_cpu(whitebox: WhiteBox) -> None:
    """Once it has, it should be among the primitives."""
    stack = STACKS["zigzag"]  # which is the order that it has, too
    verdict = validate_stack(stack, whitebox, step=planted(step_of(stack), "context.attend_to_all", of_torch))
    assert verdict.outcome == "unknown", verdict
    assert "flash_attention_for_cpu.default does not have a sharding strategy" in verdict.details, verdict


@pytest.mark.sweep
def test_a_block_that_is_computed_again_in_another_mode_is_refused_by_torch(whitebox: WhiteBox) -> None:
    verdict = validate_stack(
        STACKS["recompute"], whitebox, step=planted(step_of(STACKS["recompute"]), "recompute.again", in_eval)
    )
    assert (verdict.word, verdict.laws) == ("error", ()), verdict
    assert "CheckpointError" in verdict.headline


def in_eval(right: Step) -> Step:
    def again(block: Any, x: Tensor, **how: Any) -> Any:
        def call(x: Tensor) -> Any:
            times.append(0)
            block.train(len(times) == 1)
            made = block(x)
            block.train()
            return made

        times: list[int] = []
        return right(call, x, **how)

    return again
