"""An optimizer that takes little notice of the size of gradients: what it moved does not tell how they were clipped."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.contract import Contract
from pipeproof.core.mismatch import Mismatch
from pipeproof.core.verdict import LawResult, Verdict
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.rules.update import update
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from pipeproof.whitebox import WhiteBox
from tests.support.steps import blocks, pairs
from tests.support.steps import loss_fn as square

loss_fn = nn.functional.cross_entropy


def build() -> nn.Sequential:
    torch.manual_seed(0)
    first = (nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(*first, nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    model[0].bias.requires_grad_(False)
    return model


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 5, 5, generator=draw), torch.randint(0, 3, (4,), generator=draw)) for _ in range(4)
    ]  # fmt: skip


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


def test_a_factor_that_is_the_right_one_is_no_clipping() -> None:
    model = build()
    record = record_step(model, data(), loss_fn=loss_fn, optimizer=optimizer_of(model), contract=Contract(max_norm=0.5))
    job = build()
    optimizer, losses = optimizer_of(job), []
    with check_step(job, data(), against=record) as check:
        for x, target in data():
            loss = loss_fn(job(x), target)
            (loss / 4).backward()
            losses.append(loss.item())
        check.gradients()
        norm = nn.utils.clip_grad_norm_(job.parameters(), 1e9)  # which clips nothing
        optimizer.step()
        check.report(losses=losses, norm=float(norm))
    assert check.verdict.outcome != "pass"
    assert "multiplied by 0.6341, expected 0.6341" not in check.verdict.details
    assert [cause.kind for cause in check.verdict.causes] == ["update"]
    assert [[cause.kind for cause in one] for one in check.verdict.alternatives] == [["clip"]]


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


@pytest.mark.parametrize(
    ("wrong", "place"),
    [((1, 3), "ranks 1, 3"), ((3,), "rank 3, stage 1"), ((0, 1, 2, 3), "everywhere"), ((0, 2), "everywhere")],
    ids=["one replica", "one rank", "all", "the first replica"],
)
def test_an_optimizer_that_is_another_on_some_ranks_is_told_of_these(
    whitebox: WhiteBox, wrong: tuple[int, ...], place: str
) -> None:
    """Every rank runs the whole model, and hands back its own half; its second rank is held against the first."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = [square(model(x), target) for x, target in microbatches]
        (torch.stack(losses).sum() / len(losses)).backward()
        rank = dist.get_rank()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 4
        own = model[:2] if rank < 2 else model[2:]
        sgd(own, 0.2 if rank in wrong else 0.1).step()
        return own, [loss.item() for loss in losses]

    options: dict[str, Any] = {"microbatches": pairs(), "ranks": [0, 1, 0, 1], "loss_fn": square, "optimizer": sgd}
    (cause,) = whitebox.validate(step, reference=blocks, **options).causes
    assert (cause.kind, cause.place) == ("update", place), str(cause)


def test_an_update_that_rounding_explains_is_no_fault_of_the_optimizer() -> None:
    one = Mismatch("updated-parameters", 1, stage=0, rank=0, parameter="weight", error=0.01, limit=0.02)
    verdict = Verdict("", "unknown", "none", (LawResult("updated-parameters", "unknown", checked=1),), (one,))
    assert update(Evidence(verdict, (0,), 4, 1, gradients={}, norms=[])) == []
