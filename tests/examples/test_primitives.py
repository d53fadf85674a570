"""Each kind of parallelism inside a stage is right alone and stacked, and bugs in each are caught and named."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import primitives
import pytest
import stacks
import torch
from torch import nn

from pipeproof.foreign import WhiteBox
from pipeproof.judging.verdict import Verdict

Step = Callable[..., Any]
KINDS: dict[str, tuple[Step, Callable[[], nn.Module], dict[str, int]]] = {
    "tensor": (primitives.tensor_parallel, primitives.dense_model, {"tp": 2}),
    "sequence": (primitives.sequence_parallel, primitives.dense_model, {"sp": 2}),
    "expert": (primitives.expert_parallel, primitives.mixture_model, {"ep": 2}),
    "expert, own modules": (primitives.experts_of_its_own, primitives.mixture_without_biases, {"ep": 2}),
    "context": (primitives.context_parallel, primitives.attention_model, {"cp": 2}),
    "stack": (primitives.stacked, primitives.dense_model, {"pp": 2, "dp": 2, "tp": 2}),
    "ddp": (stacks.replicated, primitives.dense_model, {"dp": 2}),
    "ddp, unused": (partial(stacks.replicated, unused=True), primitives.dense_model, {"dp": 2}),
    "ddp, every backward": (partial(stacks.replicated, every=True), primitives.dense_model, {"dp": 2}),
    "zero 3": (stacks.sharded, primitives.dense_model, {"fsdp": 2}),
    "zero 2": (partial(stacks.sharded, reshard=False), primitives.dense_model, {"fsdp": 2}),
    "zero 3, every backward": (partial(stacks.sharded, every=True), primitives.dense_model, {"fsdp": 2}),
    "hsdp": (partial(stacks.sharded, copies=2), primitives.dense_model, {"dp_replicate": 2, "dp_shard": 2}),
    "pipeline, zero 3": (stacks.with_shards, primitives.dense_model, {"pp": 2, "fsdp": 2}),
    "pipeline, expert": (stacks.with_experts, primitives.mixture_model, {"pp": 2, "ep": 2}),
    "pipeline, context": (stacks.with_parts_of_sequences, primitives.attention_model, {"pp": 2, "cp": 2}),
}


def judged(whitebox: WhiteBox, kind: str, seed: int = 0, **fault: str) -> Verdict:
    step, model, ranks = KINDS[kind]
    draw = torch.Generator().manual_seed(seed)
    shape = (3, primitives.SEQUENCE, primitives.WIDTH)
    data = [(torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)) for _ in range(4)]
    return whitebox.validate(
        partial(step, **fault), reference=model, microbatches=data, ranks=ranks, loss_fn=primitives.loss_fn
    )


SEEDS = range(int(os.environ.get("PRIMITIVES_SEEDS", "1")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_right_passes(whitebox: WhiteBox, kind: str, seed: int) -> None:
    verdict = judged(whitebox, kind, seed)
    assert verdict.verdict == "pass", verdict
    parameters = len(list(KINDS[kind][1]().parameters()))
    assert verdict.law("gradient").checked == parameters
    assert verdict.law("parameters-once").checked == parameters
    assert verdict.law("replicas").checked + verdict.law("shards").checked > 0


@pytest.mark.parametrize(
    ("kind", "fault", "cause", "rank", "told"),
    [
        ("expert", "router not reduced", "not-reduced", 1, "not reduced over all replicas"),
        ("expert", "times ranks", "scale", 0, "2, the number of replicas"),
        ("expert", "wrong order", "computation", 0, "its output is like nothing that the reference computes"),
        ("context", "not reduced", "not-reduced", 1, "not reduced over ranks 0, 1: what they have adds up"),
        ("context", "mean", "scale", 0, "1/2, one over the number of ranks"),
        ("context", "alone", "", 0, "unknown: the evidence does not decide"),
        ("context", "positions", "", 0, "unknown: the evidence does not decide"),
        ("context", "torch's gather", "", 0, "unknown: the evidence does not decide"),
        ("tensor", "bias on each", "scale", 0, "0.inner.2.bias: 2 times"),
        ("tensor", "mean for sum", "", 0, "0.inner.2.bias is no multiple of what the others say"),
        ("stack", "not reduced", "", 2, "unknown: the evidence does not decide"),
    ],
)
def test_a_bug_is_caught(whitebox: WhiteBox, kind: str, fault: str, cause: str, rank: int, told: str) -> None:
    verdict = judged(whitebox, kind, fault=fault)
    assert verdict.verdict == "fail"
    assert {one.kind for one in verdict.cause} == ({cause} if cause else set())
    assert verdict.mismatches[0].rank == rank
    assert told in str(verdict).partition("  replay")[0]  # which has the name of this test, and so these words
