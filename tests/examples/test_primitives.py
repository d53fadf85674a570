"""Each kind of parallelism is right alone and stacked; tests/quality/axis_faults.py has the bugs in each."""

import copy
from dataclasses import replace

import pytest
from torch import nn

from pipeproof.whitebox import WhiteBox
from pipeproof.wings.primitives.stacked import PARTS, reference_of, step_of, validate_stack
from pipeproof.wings.primitives.stacks import Stack, smallest_stack
from tests.support.primitives import SEEDS, all_held
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
UNUSED = {  # some microbatches, or none of them, use some of the weights
    "static, spare": Stack({"dp": 2}, ("ddp-static",), blocks="spare"),
    "spare": Stack({"dp": 2}, ("ddp-unused",), blocks="spare"),
    "optional": Stack({"dp": 2}, ("ddp-unused",), blocks="optional"),
    "pp, spare": Stack({"pp": 2, "dp": 2}, ("ddp-unused",), blocks="spare"),
    "pp, optional": Stack({"pp": 2, "dp": 2}, ("ddp-unused",), blocks="optional"),
}
RUN = {**STACKS, **MORE, **UNEVEN, **UNUSED}
SHOWN = ("pp, tp", "pp, ddp, tp", "pp, zero-1", "pp, ep", "recompute-reentrant, zero-3")  # by others on as many ranks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", some(RUN, left=[*MORE, *SHOWN, *UNEVEN, *UNUSED]))
def test_what_is_right_passes(whitebox: WhiteBox, kind: str, seed: int) -> None:
    stack = RUN[kind]
    verdict = validate_stack(replace(stack, seed=seed), whitebox)
    assert verdict.outcome == "pass", verdict
    if kind not in UNUSED:
        assert all_held(verdict, stack)
        return
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
