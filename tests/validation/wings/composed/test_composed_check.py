"""A step of a job that is not ours, held against itself: what is right passes, whatever stages are like."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pipeproof import Contract, StageByStage
from pipeproof.core.reason import Reason
from pipeproof.records.step_check import check_step
from pipeproof.wings.composed import check as composed_check
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, TOKENS, Counted, Job, Layer, Words, checked, layers


class Buffered(nn.Module):
    """One buffer is made at the first call; another has two names."""

    late: Tensor | None
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("late", None)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("again", self.count)

    def forward(self, x: Tensor) -> Tensor:
        self.late = torch.ones(8) if self.late is None else self.late * 1.5
        self.count.add_(1)
        return self.layer(x) * self.late * self.again


class Twice(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


def hooked(*, back: bool = False) -> nn.Module:
    """What comes in is halved, and what goes out is doubled; of what flows ``back``, the sine does."""
    stage = Layer()
    stage.register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))
    stage.register_forward_hook(lambda _, given, made: made * 2)
    if back:
        stage.register_full_backward_pre_hook(lambda _, flows: (torch.sin(flows[0]),))
    return stage


def shared() -> list[nn.Module]:
    first, second, third = (Layer() for _ in range(3))
    third.layer.weight = first.layer.weight
    return [first, second, third]


def both(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, y


def noisy(y: Tensor, noise: Tensor) -> Tensor:
    return torch.tanh(y + noise)


def tokens_at(stage: int, m: int) -> dict[str, Tensor]:
    return {"places": torch.arange(4).expand(3, 4)} if not stage else {}


def noise_at(stage: int, m: int) -> dict[str, Tensor]:
    return {"noise": torch.randn(4, 8)}


def target_at(stage: int, m: int, *, wrong: bool = False) -> dict[str, Tensor]:
    return {"target": DATA[0 if wrong and m == 1 else m][1]} if stage == 1 else {}


def first_target_at(stage: int, m: int) -> dict[str, Tensor]:
    return {"target": DATA[0][1]} if stage == 1 else {}


def to_loss(y: Tensor, target: Tensor) -> Tensor:
    return MSE(y, target)


def masked(y: Tensor, mask: Tensor) -> Tensor:
    return y * mask


def spread(y: Tensor, by: Tensor) -> Tensor:
    return torch.sparse.mm(by, y)


def with_mask(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, y > 0


def of_classes(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output @ torch.ones(8, 8, dtype=output.dtype).tril(), target.argmax(-1))


def in_bf16(of_loss: bool, *, loss: bool) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=loss or not of_loss)


def absolute(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().square().mean()


ACROSS = {3: [(2, 0), (0, 0)]}  # the last of four stages gets what the first gave, too
COMPLEX = [(torch.complex(x, -x), y) for x, y in DATA]
RIGHT: dict[str, Callable[[], Job]] = {
    "frozen": lambda: Job([Layer(trained=False), *layers(torch.tanh, torch.sin)]),
    "without parameters": lambda: Job([*layers(torch.tanh), nn.Dropout(0.5), Layer(torch.sin)]),
    "positions of the form of tokens": lambda: Job([Words(), *layers(torch.tanh)], TOKENS, more=tokens_at),
    "noise of the form of messages": lambda: Job(layers(noisy, noisy, noisy), more=noise_at),
    "a sparse matrix": lambda: Job(layers(spread, spread), more=lambda stage, m: {"by": torch.eye(4).to_sparse()}),
    "the target comes in": lambda: Job(layers(torch.tanh, to_loss), loss_fn=None, more=target_at),
    "one tensor is two outputs": lambda: Job(layers(both, torch.mul, both), loss_fn=lambda y, t: MSE(y[0], t)),
    "one output is for two stages": lambda: Job(layers(*[torch.tanh] * 3, torch.add), route=ACROSS),
    "each of two stages has a backward of its own": lambda: Job(
        layers(*[torch.tanh] * 3, torch.add), route={3: [(2, 0), (1, 0)]}, apart={1: 1}
    ),
    "one weight has two names": lambda: Job([Twice(), Twice()]),
    "one weight is in two stages": lambda: Job(shared()),
    "complex": lambda: Job([nn.Linear(8, 8, dtype=torch.complex64) for _ in range(2)], COMPLEX, loss_fn=absolute),
    "sparse": lambda: Job([Words(sparse=True), *layers(torch.tanh)], TOKENS, more=tokens_at),
    "hooks change what passes": lambda: Job([hooked(), hooked(back=True)]),
    "buffers": lambda: Job([Buffered(), Buffered()]),
    "random": lambda: Job(layers(lambda y: y * random.random(), lambda y: y * numpy.random.rand())),
    "the loss writes": lambda: Job(layers(torch.sin, torch.sin), loss_fn=lambda y, t: MSE(y.mul_(2.0), t)),
    "the loss draws": lambda: Job(layers(torch.tanh, torch.sin), loss_fn=lambda y, t: MSE(nn.functional.dropout(y), t)),
    "cast": lambda: Job(layers(torch.tanh, torch.sin), loss_fn=of_classes, cast=partial(in_bf16, loss=True)),
    "cast but for the loss": lambda: Job(
        layers(torch.tanh, torch.sin), loss_fn=of_classes, cast=partial(in_bf16, loss=False)
    ),
    "a mode that does not matter": lambda: Job([one.eval() for one in layers(torch.tanh, torch.sin)]),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_passes(case: str) -> None:
    verdict = checked(RIGHT[case]())
    assert verdict.outcome == "pass", str(verdict)


def test_what_a_rank_makes_is_no_data() -> None:
    given = [((x, torch.randint(9, (3, 4))), target) for x, target in TOKENS]  # the second is used nowhere
    verdict = checked(Job([Words(), *layers(torch.tanh)], TOKENS, more=tokens_at), given=given)
    assert (verdict.outcome, verdict.law("boundaries").reasons) == ("unknown", (Reason.WIRING,))
    golden(verdict.law("boundaries").note)


def test_other_data_than_was_given_is_wrong() -> None:
    given = [(x.flip(1), target) for x, target in TOKENS]
    verdict = checked(Job([Words(), *layers(torch.tanh)], TOKENS, more=tokens_at), given=given)
    assert verdict.law("boundaries").outcome == "fail", str(verdict)


def detached(stage: int, microbatch: int, given: list[Tensor]) -> list[Tensor]:
    return [one.detach() for one in given] if (stage, microbatch) == (1, 2) else given


def swapped_mask(stage: int, microbatch: int, given: list[Tensor]) -> list[Tensor]:
    return [given[0], ~given[1]] if stage == 1 else given


WRONG: dict[str, tuple[Callable[[], Job], str]] = {
    "a gradient from afar is lost": (
        lambda: Job(layers(*[torch.tanh] * 3, torch.add), route=ACROSS, keep=0.0), "boundaries"
    ),
    "a gradient from afar is 1e-3 too large": (
        lambda: Job(layers(*[torch.tanh] * 3, torch.add), route=ACROSS, keep=1.001), "boundaries"
    ),
    "one of two backwards brings nothing": (
        lambda: Job(layers(*[torch.tanh] * 3, torch.add), route={3: [(2, 0), (1, 0)]}, apart={1: 1}, keep=0.0),
        "boundaries",
    ),
    "one of two backwards brings 1e-3 too much": (
        lambda: Job(layers(*[torch.tanh] * 3, torch.add), route={3: [(2, 0), (1, 0)]}, apart={1: 1}, keep=1.001),
        "boundaries",
    ),
    "another's target comes in": (
        lambda: Job(layers(torch.tanh, to_loss), loss_fn=None, more=partial(target_at, wrong=True)), "boundaries"
    ),
    "one target comes in always": (
        lambda: Job(layers(torch.tanh, to_loss), loss_fn=None, more=first_target_at), "boundaries"
    ),
    "one message wants no gradient": (lambda: Job(layers(*[torch.tanh] * 3), fault=detached), "boundaries"),
    "no mask is as it was sent": (lambda: Job(layers(with_mask, masked), fault=swapped_mask), "boundaries"),
    "a mode that matters": (
        lambda: Job([*layers(torch.tanh), nn.Sequential(nn.Linear(8, 8), nn.Dropout()).eval()]), "microbatches"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_fails(case: str) -> None:
    job, law = WRONG[case]
    verdict = checked(job())
    assert law in [one.name for one in verdict.laws if one.outcome == "fail"], str(verdict)


class NotAgain(Layer):
    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        if self.calls == len(DATA):
            raise ValueError("too often")
        return super().forward(x)


UNKNOWN: dict[str, tuple[Callable[[], Job], str]] = {
    "a counter": (lambda: Job([*layers(torch.tanh), Counted(), *layers(torch.sin)]), "changed since: calls; cal"),
    "it cannot be run again": (lambda: Job([NotAgain(), *layers(torch.sin)]), "ValueError: too often"),
}


@pytest.mark.parametrize("case", UNKNOWN)
@pytest.mark.parametrize("max_norm", [math.inf, 0.1])
def test_all_laws_say_what_is_not_known(case: str, max_norm: float) -> None:
    job, sentence = UNKNOWN[case]
    verdict = checked(job(), contract=Contract(max_norm=max_norm))
    laws = {one.name: one.outcome for one in verdict.laws}
    assert verdict.outcome == "unknown", str(verdict)
    assert sentence in verdict.details
    assert laws["boundaries"] == laws["gradient"] == laws["grad-norm"] == "unknown", str(verdict)


def test_a_gradient_that_no_backward_gives_is_not_known() -> None:
    """As where a stage puts off its weights' gradients, and adds them up by hand."""
    first, last = layers(torch.tanh, torch.sin)
    first.more = nn.Parameter(torch.zeros(8))
    verdict = checked(Job([first, last], change=lambda: setattr(first.more, "grad", torch.ones(8))))
    assert verdict.outcome == "unknown", str(verdict)
    assert verdict.law("boundaries").reasons == (Reason.RERUN,)
    assert "gradient of more" in verdict.details


def test_a_microbatch_that_never_ran_is_named() -> None:
    verdict = checked(Job(layers(torch.tanh, torch.sin), DATA[:2]), given=DATA)
    cause = verdict.causes[0]
    assert (cause.kind, cause.microbatches) == ("dropped", (2,)), str(verdict)
    golden(cause.detail)


class Switching(nn.Module):
    """In evaluation mode in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Sequential(nn.Linear(8, 8), nn.Dropout()), 0

    def __call__(self, x: Tensor) -> Any:
        self.calls += 1
        self.train(self.calls != 2)
        return super().__call__(x)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def test_a_call_in_another_mode_is_named() -> None:
    verdict = checked(Job([*layers(torch.tanh), Switching()]))
    (cause,) = verdict.causes
    assert (cause.kind, cause.stage, cause.microbatches, cause.action) == ("mode", 1, (1,), "1F1"), str(verdict)


def test_what_is_no_step_is_refused() -> None:
    (one,) = layers(torch.tanh)
    golden(checked(Job([one, one])).details.splitlines()[0])
    assert "microbatches is empty" in str(checked(Job([one]), given=[]))
    with check_step(one, DATA, against=StageByStage(MSE), operation=1) as check:
        check.gradients()
    golden(check.verdict.details.splitlines()[0])
    with check_step(one, DATA, against=StageByStage(MSE)) as check:
        check.gradients()
    golden(check.verdict.details.splitlines()[0])


def test_a_crash_of_ours_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(composed_check, "judge")
    verdict = checked(Job(layers(torch.tanh, torch.sin)))
    assert verdict.outcome == "unknown"
    assert verdict.law("comparable").reasons == (Reason.CRASH,), str(verdict)
