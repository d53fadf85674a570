"""More than losses: what a step puts out by name, of a model with experts, on two ranks."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import Contract, StepResult, watch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import WIDTH, pairs, sgd

EXPERTS, AUX = 3, 0.1


class Routed(nn.Module):
    """Each row goes to one of several experts; gives the auxiliary loss and the counts of rows, too."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shares = self.router(x).softmax(dim=-1)
        best = shares.argmax(dim=-1)
        made = torch.stack([expert(x) for expert in self.experts], dim=1)
        rows = torch.arange(len(x))
        counts = torch.bincount(best, minlength=EXPERTS)
        balance = (shares.mean(dim=0) * counts / len(x)).sum() * EXPERTS
        return made[rows, best] * shares[rows, best].unsqueeze(-1), balance, counts


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Routed(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made, balance, counts = self.first(x)
        return self.last(made.tanh()), balance, counts


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def loss_fn(output: Any, target: Tensor) -> Tensor:
    logits, balance, _ = output
    return nn.functional.mse_loss(logits, target) + AUX * balance


def outputs(output: Any, target: Tensor) -> Mapping[str, Tensor]:
    logits, balance, counts = output
    return {"logits": logits, "aux_loss": balance, "routing": counts}


Fault = Callable[[str, list[Any]], list[Any]]
Change = Callable[[list[Any]], list[Any]]


def step(model: Any, microbatches: list[Any], *, fault: Fault = lambda name, made: made) -> StepResult:
    """A microbatch at a time: the experts on rank 0, which tells rank 1 their auxiliary loss, the rest on rank 1."""
    first, count = dist.get_rank() == 0, len(microbatches)
    stage, losses = watch(model.first if first else model.last), []
    observed: dict[str, list[Any]] = {"aux_loss": [], "routing": []} if first else {"logits": []}
    for x, target in microbatches:
        if first:
            made, balance, counts = stage(x)
            y = made.tanh()
            dist.send(y.detach(), 1)
            dist.send(balance.detach(), 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            torch.autograd.backward([y, AUX * balance / count], [gradient, torch.ones(())])
            observed["aux_loss"].append(balance.item())
            observed["routing"].append(counts)
        else:
            x, balance = torch.empty_like(x), torch.empty(())
            dist.recv(x, 0)
            dist.recv(balance, 0)
            logits = stage(x.requires_grad_())
            loss = nn.functional.mse_loss(logits, target)
            (loss / count).backward()
            dist.send(x.grad, 0)
            losses.append((loss + AUX * balance).item())
            observed["logits"].append(logits)
    return StepResult(stage, losses, outputs={name: fault(name, made) for name, made in observed.items()})


def judged(whitebox: WhiteBox, of_step: Any = step, **more: Any) -> Verdict:
    wanted = {"reference": build_model, "ranks": 2, "loss_fn": loss_fn, "contract": Contract(outputs=outputs)} | more
    return whitebox.validate(of_step, microbatches=pairs(4, rows=6), **wanted)


def test_all_that_is_put_out_is_compared(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox)
    assert verdict.outcome == "pass", verdict
    law = verdict.law("outputs")
    assert (law.outcome, law.checked, law.exact) == ("pass", 12, 8), "the auxiliary losses are numbers of a wider type"


def other(m: int, change: Callable[[Any], Any]) -> Change:
    """What was put out of microbatch ``m`` is another."""
    return lambda made: [*made[:m], change(made[m]), *made[m + 1 :]]


SCALED = other(2, lambda one: one * 1.001)


@pytest.mark.parametrize(
    ("of", "change", "rank", "microbatch", "named"),
    [
        ("logits", SCALED, 1, 2, True),
        ("aux_loss", SCALED, 0, 2, False),  # of one number, any is a multiple
        ("logits", lambda made: [made[1], made[0], *made[2:]], 1, 0, True),
        ("logits", other(1, lambda one: one + 1e-3 * (torch.arange(one.numel()) == 0).view_as(one)), 1, 1, True),
        ("logits", lambda made: [one.bfloat16() for one in made], 1, 0, True),
        ("routing", other(1, lambda one: one + torch.tensor([1, -1, 0])), 0, 1, False),
        ("logits", lambda made: made[:3], 1, None, False),
    ],
    ids=["scaled", "number-scaled", "swapped", "one-element", "narrow", "one-more", "one-less"],
)
def test_what_is_wrong_is_named(
    whitebox: WhiteBox, of: str, change: Change, rank: int, microbatch: int | None, named: bool
) -> None:
    verdict = judged(whitebox, partial(step, fault=lambda name, made: change(made) if name == of else made))
    first = verdict.mismatches[0]
    assert {(one.rank, one.output) for one in verdict.mismatches} == {(rank, of)}
    assert verdict.outcome == "fail"
    assert (first.law, first.rank, first.microbatch, first.output) == ("outputs", rank, microbatch, of), verdict
    assert f"output {of}" in verdict.details
    assert [one.kind for one in verdict.causes] == ["report"] * named, verdict
    golden("\n".join([*(one.detail for one in verdict.causes), *verdict.undecided]), numbers=False)


@pytest.mark.sweep
def test_what_nobody_hands_back_is_said_and_not_required(whitebox: WhiteBox) -> None:
    def without(*names: str) -> Any:
        def fewer(model: Any, microbatches: list[Any]) -> StepResult:
            made = step(model, microbatches)
            kept = {name: one for name, one in made.outputs.items() if name not in names}
            return StepResult(made.modules, made.losses, outputs=kept)

        return fewer

    verdict = judged(whitebox, without("aux_loss"))
    assert (verdict.outcome, verdict.law("outputs").left_out) == ("pass", ())
    golden(verdict.law("outputs").note)
    verdict = judged(whitebox, without("aux_loss", "logits", "routing"))
    assert (verdict.outcome, verdict.law("outputs").outcome) == ("pass", "not observed")


@pytest.mark.sweep
def test_what_cannot_be_compared_is_said(whitebox: WhiteBox) -> None:
    other = judged(whitebox, contract=Contract(outputs=lambda output, target: {"score": output[0]}))
    without = judged(whitebox, contract=Contract())
    listed = judged(whitebox, contract=Contract(outputs=lambda output, target: [output[0]]))
    number = judged(whitebox, partial(step, fault=lambda name, made: 3))  # type: ignore[arg-type,return-value]
    for verdict in (other, without, listed, number):
        assert verdict.outcome == "unknown"
        golden(re.sub(r"rank \d|'logits'|'aux_loss'", "#", verdict.details.splitlines()[0]))


def evaluating(
    model: Model, operations: Iterator[tuple[str, list[Any]]], *, late: bool = False
) -> Iterator[StepResult]:
    """On one rank; ``late``: an evaluation hands back what the training before it put out."""
    optimizer, made = sgd(model), list[Any]()
    for operation, microbatches in operations:
        before, made = made, []
        for x, target in microbatches:
            with torch.set_grad_enabled(operation == "train"):
                output = model(x)
                loss = loss_fn(output, target)
            if operation == "train":
                (loss / len(microbatches)).backward()
            made.append((output, loss.item()))
        if operation == "train":
            optimizer.step()
        observed = before if late and operation == "eval" else made
        yield StepResult(model, [loss for _, loss in made], outputs={"logits": [output[0] for output, _ in observed]})
        optimizer.zero_grad()


def test_outputs_of_an_evaluation_are_compared_too(whitebox: WhiteBox) -> None:
    declared = Contract(outputs=outputs, operations=["train", "eval"])
    several = {"ranks": 1, "contract": declared, "optimizer": sgd}
    verdict = judged(whitebox, evaluating, **several)
    assert (verdict.outcome, verdict.law("outputs").checked) == ("pass", 4), verdict
    first = judged(whitebox, partial(evaluating, late=True), **several).mismatches[0]
    assert (first.law, first.operation, first.doing, first.output) == ("outputs", 2, "eval", "logits")
