"""Four runtimes that are not ours, each judged in at most ten lines: right as they are, and with a planted bug."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import interleaved_loop
import pytest
import torch.distributed as dist
import torch_pipelining
import weight_grad_store
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.examples.my_pipeline import OneFOneB, loss_fn
from tests.support.racy_1f1b import ONE_BUFFER
from tests.support.steps import blocks, pairs

RANKS, WIDTH, COUNT = 4, 16, 8
Step = Callable[..., Any]


build_model, data = partial(blocks, 2 * RANKS, width=WIDTH), partial(pairs, COUNT, rows=8, width=WIDTH, seed=1)


def hand_written(model: nn.Sequential, microbatches: list[Any], fault: str = "") -> Any:
    stage = watch(model[2 * dist.get_rank() : 2 * dist.get_rank() + 2])
    return stage, (ONE_BUFFER if fault else OneFOneB)(stage, microbatches).step()


def interleaved(model: nn.Sequential, microbatches: list[Any], fault: str = "") -> Any:
    chunks = [watch(model[dist.get_rank()]), watch(model[RANKS + dist.get_rank()])]

    def forward_step(data: Any, chunk: nn.Module, x: Tensor | None) -> Any:
        inputs, target = next(data)
        return chunk(inputs if x is None else x), lambda output: loss_fn(output, target)

    iterators, count = [iter(microbatches), iter(microbatches)], len(microbatches)
    losses = interleaved_loop.forward_backward(
        forward_step, iterators, chunks, num_microbatches=count, shape=(8, WIDTH), fault=fault
    )
    return chunks, losses


def zero_bubble(model: nn.Sequential, microbatches: list[Any], fault: str = "") -> Any:
    store = weight_grad_store.WeightGradStore()
    layers = [weight_grad_store.StoredLinear(block[0], store) for block in model[2 * dist.get_rank() :][:2]]
    stage = watch(nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh()))
    return stage, weight_grad_store.zero_bubble(stage, store, microbatches, loss_fn, fault=fault)


def pipelining(model: nn.Sequential, microbatches: list[Any], fault: str = "") -> Any:
    stage = watch(model[2 * dist.get_rank() : 2 * dist.get_rank() + 2])
    return stage, torch_pipelining.train(stage, microbatches, loss_fn, fault=fault)


# The planted bug, and the law, rank, stage and what is said first.
RUNTIMES: dict[Step, tuple[str, str, int, int, str]] = {
    hand_written: (
        "one-buffer",
        "boundaries",
        2,
        2,
        r"input when the backward begins: microbatch 1's \(expected microbatch 0's\)",
    ),
    interleaved: ("undivided", "gradient", 3, 7, r"8 times expected, cosine 1\.000000"),
    zero_bubble: ("no-last-flush", "gradient", 3, 3, r"norm 0\.\d+, cosine 0\.\d+"),
    pipelining: ("unscaled", "gradient", 3, 3, r"8 times expected, cosine 1\.000000"),
}
each = pytest.mark.parametrize("step", RUNTIMES, ids=lambda step: step.__name__)


def judged(whitebox: WhiteBox, step: Step) -> Verdict:
    return whitebox.validate(step, reference=build_model, microbatches=data(), ranks=RANKS, loss_fn=loss_fn)


@each
def test_a_runtime_as_it_is_passes_bit_for_bit_under_every_law(whitebox: WhiteBox, step: Step) -> None:
    verdict = judged(whitebox, step)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)
    for law in ("initial-weights", "microbatches", "boundaries", "loss", "gradient"):
        assert verdict.law(law).outcome == "pass"
        assert verdict.law(law).checked > 0


@each
def test_a_planted_bug_is_caught_and_told(whitebox: WhiteBox, step: Step) -> None:
    fault, law, rank, stage, said = RUNTIMES[step]
    verdict = judged(whitebox, partial(step, fault=fault))
    assert verdict.outcome == "fail", str(verdict)
    first = verdict.mismatches[0]
    assert (first.law, first.rank, first.stage) == (law, rank, stage), str(verdict)
    assert re.search(said, str(first)), str(verdict)
    assert verdict.law("loss").outcome == "pass", "nothing but the gradients tells"


@each
def test_integration_is_at_most_ten_lines(step: Step) -> None:
    body = [line for line in inspect.getsource(step).splitlines()[1:] if line.strip()]
    call = [line for line in inspect.getsource(judged).splitlines()[1:] if line.strip()]
    assert 0 < len(body) + len(call) <= 10, f"{len(body) + len(call)} lines"
