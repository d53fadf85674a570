"""Causes of foreign steps, link by link: each names what it decides, and leaves open what it does not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Verdict
from pipeproof.foreign import WhiteBox, watch
from tests.support.golden import golden
from tests.support.steps import blocks, loss_fn, pairs

WIDTH, RANKS, COUNT = 8, 2, 4
Step = Callable[[Any, list[Any]], Any]

build_model = partial(blocks, seed=3)
data = partial(pairs, COUNT, rows=6)


def train(stage: nn.Module, microbatches: list[Any], change: Callable[[int, Tensor], Tensor] | None = None) -> Any:
    """A microbatch at a time through two ranks; ``change`` is made to what rank 1 receives."""
    losses = []
    for m, (x, target) in enumerate(microbatches):
        if dist.get_rank() == 0:
            y = stage(x)
            dist.send(y.detach(), 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            y.backward(gradient)
        else:
            x = torch.empty_like(x)
            dist.recv(x, 0)
            x = x if change is None else change(m, x)
            loss = loss_fn(stage(x.requires_grad_()), target)
            (loss / len(microbatches)).backward()
            dist.send(x.grad, 0)
            losses.append(loss.item())
    return stage, losses


def own_part(model: Any) -> Any:
    return model[2 * dist.get_rank() : 2 * dist.get_rank() + 2]


def own(model: Any) -> Any:
    return watch(own_part(model))


def judged(whitebox: WhiteBox, step: Step, **more: Any) -> Verdict:
    wanted = {"reference": build_model, "microbatches": data(), "ranks": RANKS, "loss_fn": loss_fn} | more
    return whitebox.validate(step, **wanted)


def only(verdict: Verdict) -> Cause:
    assert verdict.verdict == "fail", str(verdict)
    assert len(verdict.cause) == 1, str(verdict)
    return verdict.cause[0]


def test_a_right_step_has_no_cause(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, lambda model, microbatches: train(own(model), microbatches))
    assert (verdict.verdict, verdict.cause, verdict.undecided) == ("pass", (), ())
    ran = verdict.measured.ran
    assert ran is not None
    rows = [" ".join(done.action for done in row) for row in ran.ranks]
    assert rows == [" ".join(f"{stage}F{m} {stage}B{m}" for m in range(4)) for stage in (0, 1)]
    assert {one.error for row in ran.ranks for done in row for one in done.sights if one.agrees} == {0}


def received(change: Callable[[int, Tensor], Tensor]) -> Step:
    return lambda model, microbatches: train(own(model), microbatches, change)


def noise(m: int, x: Tensor) -> Tensor:
    return torch.randn_like(x) if m == 1 else x


@pytest.mark.parametrize(
    ("change", "kind", "microbatches"),
    [
        (lambda m, x: x * 0 if m == 2 else x, "uninitialised", (2,)),
        (lambda m, x: x * 0, "uninitialised", (0, 1, 2, 3)),
        (lambda m, x: x.half().float(), "rounded", (0, 1, 2, 3)),
        (lambda m, x: x / 0 if m == 1 else x, "not-finite", (1,)),
        (lambda m, x: x * 1.5, "altered", (0, 1, 2, 3)),
        (lambda m, x: x * 0 if m in (1, 2) else x, "uninitialised", (1, 2)),
        (lambda m, x: x.flip(0) if m in (1, 2) else x, "altered", (1, 2)),
        (lambda m, x: x + 0.05 * x.norm() / x.numel() ** 0.5 * noise(1, x) if m != 2 else x, "altered", (0, 1, 3)),
    ],
    ids=["zero", "all zero", "fp16", "infinite", "scaled", "two zero", "shuffled", "noise added"],
)
def test_what_a_stage_was_given_says_what_happened(
    whitebox: WhiteBox, change: Callable[[int, Tensor], Tensor], kind: str, microbatches: tuple[int, ...]
) -> None:
    cause = only(verdict := judged(whitebox, received(change)))
    assert (cause.kind, cause.rank, cause.stage, cause.microbatches) == (kind, 1, 1, microbatches)
    others = [one.kind for causes in verdict.alternatives for one in causes]
    assert ("wrong-message" in others) == (kind == "uninitialised")


def test_what_left_right_and_came_in_wrong_was_altered_between(whitebox: WhiteBox) -> None:
    cause = only(judged(whitebox, received(noise)))
    assert (cause.kind, cause.rank, cause.stage, cause.microbatches) == ("altered", 1, 1, (1,))
    golden(cause.detail, numbers=False)


def test_what_tells_nothing_is_located_and_not_named(whitebox: WhiteBox) -> None:
    """Nobody watches the stage before, so what came in may have been sent so."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        return train(own(model) if dist.get_rank() else own_part(model), microbatches, noise)

    verdict = judged(whitebox, step)
    assert (verdict.verdict, verdict.cause) == ("fail", ())
    assert not any("wrong-message" in one.kinds for one in verdict.ruled_out)
    golden(verdict.undecided[0], numbers=False)


def test_of_two_that_tell_nothing_nobody_knows_which_is_which(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        rank = dist.get_rank()
        stage = watch(own_part(model)) if rank else own_part(model)
        return train(stage, microbatches, lambda m, x: torch.randn_like(x) if m in (1, 2) else x)

    verdict = judged(whitebox, step)
    assert (verdict.verdict, verdict.cause) == ("fail", ())
    golden(verdict.undecided[0], numbers=False)
    assert {one.microbatch for one in verdict.mismatches if one.law == "boundaries"} == {None}
    assert "dropped" not in verdict.details
    note = "of 2 calls of stage 1 nothing tells the microbatch: they were counted alone"
    assert (verdict.law("microbatches").outcome, verdict.law("microbatches").note) == ("pass", note)


def test_what_came_back_to_a_stage_before_tells_whose_it_was(whitebox: WhiteBox) -> None:
    cause = only(judged(whitebox, received(lambda m, x: torch.randn_like(x) if m in (1, 2) else x)))
    assert (cause.kind, cause.stage, cause.microbatches) == ("altered", 1, (1, 2))
    told = "is no microbatch's (taken for microbatch {0}: what passed between it and stage 0 tells it)"
    assert all(f"input of microbatch {m} {told.format(m)}" in cause.detail for m in (1, 2))


def test_noise_for_some_and_a_microbatch_too_few(whitebox: WhiteBox) -> None:
    """What flowed back tells which ones had noise; that one of these was left out nobody says."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        return train(own(model), microbatches[:-1], lambda m, x: torch.randn_like(x) if m else x)

    verdict = judged(whitebox, step)
    assert verdict.law("microbatches").outcome == "fail"
    assert [(cause.kind, cause.microbatches) for cause in verdict.cause] == [("altered", (1, 2))], str(verdict)


def test_a_microbatch_in_place_of_another_was_paired_wrongly_or_came_so(whitebox: WhiteBox) -> None:
    kept: list[Tensor] = []

    def change(m: int, x: Tensor) -> Tensor:
        kept.append(x.clone())
        return kept[1].clone() if m == 2 else x

    verdict = judged(whitebox, received(change))
    cause, ((other,),) = only(verdict), verdict.alternatives
    assert (cause.kind, cause.stage, cause.microbatches) == ("mispaired", 1, (2,))
    golden(cause.detail)
    assert (other.kind, other.stage, other.microbatches) == ("wrong-message", 1, (2,))


@pytest.mark.parametrize(
    ("drawn", "wrong"), [((0, 0, 1, 2), (1, 2, 3)), ((0, 1, 1, 2), (2, 3)), ((0, 0, 2, 3), (1,))], ids=str
)
def test_data_that_comes_late_or_twice_is_exchanged_data_and_nothing_was_dropped(
    whitebox: WhiteBox, drawn: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        return train(
            own(model), [(microbatches[m][0], target) for m, (_, target) in zip(drawn, microbatches, strict=True)]
        )

    cause = only(judged(whitebox, step))
    assert (cause.kind, cause.rank, cause.stage, cause.microbatches) == ("swapped-data", 0, 0, wrong)

    verdict = judged(whitebox, lambda model, microbatches: train(own(model), [microbatches[m] for m in drawn]))
    named = {cause.kind: len(cause.microbatches) for cause in verdict.cause}
    assert named == {"dropped": 1, "doubled": 1}


def test_the_targets_of_one_microbatch_for_all(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        return train(own(model), [(x, microbatches[0][1]) for x, _ in microbatches])

    cause = only(judged(whitebox, step))
    assert (cause.kind, cause.microbatches) == ("swapped-data", (1, 2, 3))


def test_a_sum_in_place_of_a_mean_is_one_factor(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        stage = own(model)
        made = train(stage, microbatches)
        for parameter in stage.parameters():
            parameter.grad *= 6 * WIDTH
        return made

    cause = only(judged(whitebox, step))
    assert (cause.kind, cause.lines) == ("scale", ())
    golden(cause.detail)


class Squaring(nn.Module):
    """Computes something else from right inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x).square()
        return made


def wrapped(rank: int, wrap: Callable[[nn.Module], nn.Module], change: Any = None) -> Step:
    """What ``wrap`` makes of the stage of ``rank`` is watched in its place."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        stage = own_part(model)
        return train(watch(wrap(stage) if dist.get_rank() == rank else stage), microbatches, change)

    return step


@pytest.mark.parametrize("rank", [0, 1])
def test_an_output_of_right_inputs_that_the_reference_never_has_was_computed_wrongly(
    whitebox: WhiteBox, rank: int
) -> None:
    cause = only(judged(whitebox, wrapped(rank, Squaring)))
    assert (cause.kind, cause.rank, cause.stage, cause.microbatches) == ("computation", rank, rank, (0, 1, 2, 3))
    golden(cause.detail)


class Halved(nn.Module):
    """What the first stage hands on is two streams, which the next takes for each other, or adds as they are."""

    def __init__(self, layer: nn.Module, *, first: bool) -> None:
        super().__init__()
        self.layer, self.first = layer, first

    def forward(self, x: Any, y: Any = None) -> Any:
        made = self.layer(x)
        return (torch.tanh(made), torch.sigmoid(made)) if self.first else made * (1 + y)


class Chain(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return self[2](self[1](*self[0](x)))


def two_streams() -> nn.Module:
    torch.manual_seed(0)
    first, second, last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return Chain(Halved(first, first=True), Halved(second, first=False), last)


def test_inputs_that_a_stage_takes_for_each_other_are_not_called_right(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        first, second, last = (watch(stage) for stage in model)
        losses = [loss_fn(last(second(*reversed(first(x)))), target) for x, target in microbatches]
        for loss in losses:
            (loss / len(losses)).backward()
        return [first, second, last], [loss.item() for loss in losses]

    verdict = whitebox.validate(step, reference=two_streams, microbatches=data(), ranks=1, loss_fn=loss_fn)
    cause = only(verdict)
    assert (cause.kind, cause.stage) == ("wrong-message", 1)
    golden(cause.detail)
    assert [one.kind for (one,) in verdict.alternatives] == ["computation"]


class Doubling(Squaring):
    """Hands on what is right in another form."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = 2 * self.inner(x)
        return made


def test_an_output_in_another_form_is_not_blamed_for_what_is_wrong_after_it(whitebox: WhiteBox) -> None:
    def change(m: int, x: Tensor) -> Tensor:
        return (x / 2).detach() + torch.linspace(0, 1, x.numel()).view_as(x)

    verdict = judged(whitebox, wrapped(0, Doubling, change))
    assert verdict.verdict == "fail"
    assert all((cause.kind, cause.stage) != ("computation", 0) for cause in verdict.cause), str(verdict)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda weight: weight.mul_(1.5), "altered"),
        (lambda weight: weight.copy_(weight.bfloat16().float()), "rounded"),
        (lambda weight: nn.init.normal_(weight, generator=torch.Generator().manual_seed(9)), "randomness"),
    ],
    ids=["changed", "rounded", "drawn"],
)
def test_weights_that_a_step_began_with(whitebox: WhiteBox, change: Callable[[Tensor], Tensor], kind: str) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        if dist.get_rank():
            with torch.no_grad():
                change(model[3][0].weight)
        return train(own(model), microbatches)

    cause = only(judged(whitebox, step))
    assert (cause.kind, cause.rank, cause.stage, cause.parameter) == (kind, 1, 1, "3.0.weight")


def test_names_that_do_not_match_are_no_fault_of_the_partition(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        stage, losses = train(own(model), microbatches)
        return {f"mine.{name}": p.grad for name, p in stage.named_parameters()}, losses

    verdict = judged(whitebox, step)
    assert verdict.cause == ()
    golden(verdict.undecided[0])


def test_a_norm_that_one_rank_reports_otherwise(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        stage, losses = train(own(model), microbatches)
        squares = torch.stack([p.grad.double().square().sum() for p in stage.parameters()]).sum()
        dist.all_reduce(squares)
        return stage, losses, squares.sqrt() * (1.5 if dist.get_rank() else 1)

    cause = only(judged(whitebox, step))
    assert (cause.kind, cause.rank, cause.factor) == ("report", 1, pytest.approx(1.5))


def build_tied() -> nn.Module:
    model = build_model()
    assert isinstance(model, nn.Sequential)
    model[3][0].weight = model[0][0].weight
    return model


def test_a_tied_parameter_that_nobody_summed(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        return train(own(model), microbatches)

    verdict = judged(whitebox, step, reference=build_tied)
    assert verdict.verdict == "fail"
    assert {cause.kind for cause in verdict.cause} == {"tied-not-summed"}, str(verdict)


def test_a_cause_is_in_the_json_and_in_what_is_raised(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, received(lambda m, x: x.half().float()))
    assert verdict.as_dict()["cause"][0]["kind"] == "rounded"  # type: ignore[index]
    with pytest.raises(AssertionError, match=r"FAIL stage .*: a tensor went through a narrower type"):
        verdict.raise_if_failed()


class Branches(nn.Module):
    """The third block works on what the first one gives, beside the second."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.top = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.left(x)
        made: Tensor = self.top(first) + self.right(first)
        return made


def build_branches() -> nn.Module:
    torch.manual_seed(0)
    return Branches()


def alone(factor: float) -> Step:
    """All three stages on one rank, the last one's gradients times ``factor``."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        stages = [watch(stage) for stage in (model.left, model.right, model.top)]
        losses = []
        for x, target in microbatches:
            losses.append(loss_fn(model(x), target))
            (losses[-1] / len(microbatches)).backward()
        for parameter in model.top.parameters():
            parameter.grad *= factor
        return stages, [loss.detach() for loss in losses]

    return step


def test_stages_that_are_no_chain_in_the_reference_are_not_blamed_for_it(whitebox: WhiteBox) -> None:
    cause = only(judged(whitebox, alone(2.0), reference=build_branches, ranks=1))
    assert (cause.kind, cause.stage, cause.factor) == ("scale", 2, 2.0)
