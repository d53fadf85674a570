"""An optimizer that takes little notice of the size of gradients: what it moved does not tell how they were clipped."""

import re
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from pipeproof.core.contract import Contract
from pipeproof.core.mismatch import Mismatch
from pipeproof.core.verdict import LawResult, Verdict
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.rules.update import update
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from pipeproof.whitebox import WhiteBox
from tests.support.steps import adam, backward, blocks, loss_fn, pairs, sgd


def test_a_factor_that_is_the_right_one_is_no_clipping() -> None:
    model, job = blocks(), blocks()
    contract = Contract(max_norm=0.05)
    record = record_step(model, pairs(), loss_fn=loss_fn, optimizer=adam(model), contract=contract)
    optimizer = adam(job)
    with check_step(job, pairs(), against=record) as check:
        losses = backward(job, pairs())
        check.gradients()
        norm = nn.utils.clip_grad_norm_(job.parameters(), 1e9)  # which clips nothing
        optimizer.step()
        check.report(losses=losses, norm=float(norm))
    assert check.verdict.outcome != "pass"
    assert not re.search(r"multiplied by ([\d.]+), expected \1:", check.verdict.details)
    assert [cause.kind for cause in check.verdict.causes] == ["update"], str(check.verdict)
    assert [[cause.kind for cause in one] for one in check.verdict.alternatives] == [["clip"]]


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
        rank, losses = dist.get_rank(), backward(model, microbatches)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 4
        own = model[:2] if rank < 2 else model[2:]
        sgd(own, 0.2 if rank in wrong else 0.1).step()
        return own, losses

    options: dict[str, Any] = {"microbatches": pairs(), "ranks": [0, 1, 0, 1], "loss_fn": loss_fn, "optimizer": sgd}
    (cause,) = whitebox.validate(step, reference=blocks, **options).causes
    assert (cause.kind, cause.place) == ("update", place), str(cause)


def test_an_update_that_rounding_explains_is_no_fault_of_the_optimizer() -> None:
    one = Mismatch("updated-parameters", 1, stage=0, rank=0, parameter="weight", error=0.01, limit=0.02)
    verdict = Verdict("", "unknown", "none", (LawResult("updated-parameters", "unknown", checked=1),), (one,))
    assert update(Evidence(verdict, (0,), 4, 1, gradients={}, norms=[])) == []
