"""Each operation of a plan is judged once, and of ranks that have each layer together the wrong one is named."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import Contract, StepResult
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support import tensor_parallel
from tests.support.judgements import counting_judgements
from tests.support.steps import blocks, loss_fn, pairs, sgd
from tests.support.sweeps import sampled
from tests.support.tensor_parallel import Microbatch, Planted, microbatches, step

PLAN = ["train", "accumulate", "train", "eval", "train"]


def trained(
    model: nn.Module, operations: Iterator[tuple[str, list[Any]]], *, wrong: int | None = None, scale: float = 1.0
) -> Iterator[StepResult]:
    """Every operation of the plan; in the ``wrong`` one losses lack a part. Gradients of losses are ``scale`` times."""
    optimizer = sgd(model)
    for number, (operation, own) in enumerate(operations):
        with torch.set_grad_enabled(operation != "eval"):
            losses = [loss_fn(model(x), target) * (1 - 0.1 * (number == wrong)) for x, target in own]
        if operation != "eval":
            (sum(losses) * scale / len(losses)).backward()  # type: ignore[union-attr]
        if scale != 1.0:
            for one in model.parameters():
                one.grad = None if one.grad is None else one.grad / scale
        if operation == "train":
            optimizer.step()
        yield StepResult(model, [loss.item() for loss in losses], loss_scale=None if scale == 1.0 else scale)
        if operation == "train":
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("plan", "made", "judged", "outcome"),
    [
        (PLAN, {}, [0, 1, 2, 3, 4], "pass"),
        (PLAN, {"wrong": 2}, [0, 1, 2], "fail"),  # what follows is not judged
        (["train", "train"], {"scale": 2.0**10}, [0, 1], "pass"),
        (["train", "train"], {"scale": 2.0**10, "wrong": 1}, [0, 1], "fail"),
    ],
)
def test_each_operation_is_judged_once(
    whitebox_here: WhiteBox, plan: list[str], made: dict[str, Any], judged: list[int], outcome: str
) -> None:
    with counting_judgements() as found:
        verdict = whitebox_here.validate(
            partial(trained, **made),
            reference=blocks,
            microbatches=pairs(3 * len(plan)),
            ranks=1,
            loss_fn=loss_fn,
            optimizer=sgd,
            contract=Contract(operations=plan),
        )
    assert (verdict.outcome, found) == (outcome, judged), verdict


TP, DP, PP = {"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}


def judged_together(whitebox: WhiteBox, ranks: dict[str, int], **planted: Any) -> Verdict:
    data = microbatches(8 if "dp" in ranks else 4)
    own = partial(step, ranks=ranks, planted=Planted(**planted))
    build, loss = tensor_parallel.build, tensor_parallel.loss_fn
    return whitebox.validate(own, reference=build, microbatches=data, ranks=ranks, loss_fn=loss)


def of(wrong: int, change: Any) -> Any:
    """``change`` on rank ``wrong`` alone; there of a list, elsewhere the same."""
    return lambda rank, every: change(every) if rank == wrong else every


def others_targets(every: Sequence[Microbatch]) -> list[Microbatch]:
    return [(x, every[(number + 1) % len(every)][1]) for number, (x, _) in enumerate(every)]


def others_inputs(every: Sequence[Microbatch]) -> list[Microbatch]:
    return [(every[(number + 1) % len(every)][0], target) for number, (_, target) in enumerate(every)]


def zero_in_place_of_two(every: Sequence[Microbatch]) -> list[Microbatch]:
    return [*every[:2], every[0], *every[3:]]


def times(wrong: int, factor: float, *microbatches: int) -> Any:
    return lambda rank, number: factor if rank == wrong and number in (microbatches or range(8)) else 1.0


def sent_as(wrong: int, microbatch: int, factor: float) -> Any:
    def sent(rank: int, number: int, tensor: Tensor) -> Tensor:
        return tensor * factor if (rank, number) == (wrong, microbatch) else tensor

    return sent


def first_replica(rank: int, microbatch: int) -> float:
    return 0.5 if rank < 2 else 1.0


def changed(rank: int, layers: nn.Sequential) -> None:
    if rank == 0:
        with torch.no_grad():
            layers[1].norm.weight.mul_(2)


def cleared(rank: int, layers: nn.Sequential) -> None:
    if rank == 3:
        with torch.no_grad():
            layers[1].norm.weight.zero_()


def halved(rank: int, layers: nn.Sequential) -> None:
    for parameter in layers.parameters():
        parameter.grad.mul_(0.5)


def doubled_rows(rank: int, layers: nn.Sequential) -> None:
    if rank % 2:
        layers[0].up.weight.grad.mul_(2)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [TP, DP, PP], ids=["tp", "dp, tp", "pp, tp"])
def test_every_rank_is_compared(whitebox: WhiteBox, ranks: dict[str, int]) -> None:
    verdict = judged_together(whitebox, ranks)
    verdict.raise_if_failed()
    stages, lines = ranks.get("pp", 1), ranks["tp"]
    assert verdict.law("microbatches").checked == 4 * stages * lines, "forwards, backwards, calls, mode"
    each, tensors = len(microbatches(8 if "dp" in ranks else 4)), 4 * stages + 2 * (stages - 1) - (stages - 1)
    assert verdict.law("boundaries").checked == lines * each * tensors, "of every microbatch on both lines"


EVERY, ODD = (0, 1, 2, 3), (1, 3, 5, 7)
FAULTS: dict[str, tuple[dict[str, int], dict[str, Any], tuple[Any, ...]]] = {
    # kind, rank, stage, microbatches
    "targets of the next": (TP, {"given": of(1, others_targets)}, ("swapped-data", 1, 0, EVERY)),
    "inputs of the next": (TP, {"given": of(1, others_inputs)}, ("swapped-data", 1, 0, EVERY)),
    "0 in place of 2": (TP, {"given": of(1, zero_in_place_of_two)}, ("swapped-data", 1, 0, (2,))),
    "all losses undivided": (TP, {"times": times(1, 4.0)}, ("scale", 1, 0, ())),
    "one loss doubled": (TP, {"times": times(1, 2.0, 2)}, ("scale", 1, 0, (2,))),
    "one loss lost": (TP, {"times": times(1, 0.0, 2)}, ("dropped", 1, 0, (2,))),
    "a part cut too early": (TP, {"early": 1}, ("misplaced", 1, 0, ())),
    "targets in one replica": (DP, {"given": of(3, others_targets)}, ("swapped-data", 3, 0, ODD)),
    "losses in one replica": (DP, {"times": times(3, 3.0)}, ("scale", 3, 0, ODD)),
    "losses of the first replica": (DP, {"times": first_replica}, ("scale", None, 0, (0, 2, 4, 6))),
    "a weight of the first rank": (DP, {"begun": changed}, ("altered", 0, 0, ())),
    "a weight cleared": (DP, {"begun": cleared}, ("altered", 3, 0, ())),
    "parts doubled in both replicas": (DP, {"done": doubled_rows}, ("scale", None, 0, ())),
    "all parts halved on all ranks": (TP, {"done": halved}, ("scale", None, 0, ())),
    "inputs of the first stage": (PP, {"given": of(1, others_inputs)}, ("swapped-data", 1, 0, EVERY)),
    "targets of the last stage": (PP, {"given": of(3, others_targets)}, ("swapped-data", 3, 1, EVERY)),
    "zeros sent": (PP, {"sent": sent_as(1, 2, 0.0)}, ("altered", 3, 1, (2,))),
    "zero gradients sent": (PP, {"sent": sent_as(3, 1, 0.0)}, ("altered", 1, 0, (1,))),
    "gradients sent twice as large": (PP, {"sent": sent_as(3, 1, 2.0)}, ("scale", 1, 0, (1,))),
}


_STAGE = "the stage is named, and not the rank of it"
OPEN = {
    "inputs of the next": "it is caught, and has no cause",
    "0 in place of 2": _STAGE,
    "a weight of the first rank": _STAGE,
    "inputs of the first stage": "it is caught, and has no cause",
}


@pytest.mark.parametrize("fault", sampled(FAULTS, 3, open_=OPEN))
def test_the_rank_that_is_wrong_is_named(whitebox: WhiteBox, fault: str) -> None:
    ranks, planted, named = FAULTS[fault]
    verdict = judged_together(whitebox, ranks, **planted)
    assert verdict.outcome == "fail"
    one, *_ = verdict.causes
    assert (one.kind, one.rank, one.stage, one.microbatches) == named, verdict
    assert not any("wrong-message" in one.kinds for one in verdict.ruled_out) or "parts" in fault
    if "targets" in fault:
        assert one.detail.split(" (")[0].endswith(f"the target of {', '.join(map(str, [*named[3][1:], named[3][0]]))}")
