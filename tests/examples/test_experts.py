"""Experts: tokens that change theirs by rounding are no fault, and hide none; those that go wrong are named."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from my_experts import Experts, InHalves, build_model
from my_pipeline import OneFOneB, loss_fn
from torch import Tensor, nn

from pipeproof import Contract, StageByStage, StepResult, watch
from pipeproof.core.verdict import Verdict
from pipeproof.errors import ContractError
from pipeproof.whitebox import WhiteBox, step_verdict
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.primitives.layers import Mixture
from pipeproof.wings.primitives.stacked import loss_fn as decoder_loss
from pipeproof.wings.primitives.stacked import microbatches as decoder_data
from pipeproof.wings.primitives.stacked import reference_of, run, validate_stack
from pipeproof.wings.primitives.stacks import Stack
from tests.support.golden import golden
from tests.support.judgements import counting_judgements
from tests.support.steps import backward, pairs, sgd
from tests.support.sweeps import SWEEP, some

Change = Callable[[nn.Sequential], object]
WRONG = 1, 1  # the rank and the layer in its stage where choices are wrong


def build_otherwise(layers: slice, experts: slice) -> nn.Sequential:
    """As ``build_model``, but that in these layers the scores of these experts are not nearly equal."""
    model = build_model()
    with torch.no_grad():
        for layer in model[layers]:
            layer.moe.gate.weight[experts].normal_()
    return model


EVERY = slice(None)
build_apart, build_wide = partial(build_otherwise, slice(2, None), EVERY), partial(build_otherwise, EVERY, EVERY)
build_some = partial(build_otherwise, EVERY, slice(2))


def computed(moe: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """What the chosen experts make of each token."""
    made = torch.stack([expert(x) for expert in moe.experts], dim=1)
    return (made[torch.arange(len(x)).unsqueeze(1), chosen] * weights.unsqueeze(-1)).sum(1)


def nothing(stage: nn.Sequential) -> None:
    """No change."""


def in_halves(stage: nn.Sequential) -> None:
    for layer in stage:
        layer.moe.gate.__class__ = InHalves


def chosen_by(of: Callable[[Experts, Tensor], Tensor], stage: nn.Sequential) -> None:
    """Has a layer choose by other scores than those that it weighs experts with."""
    in_halves(stage)
    rank, number = WRONG
    if dist.get_rank() == rank:
        moe = stage[number].moe

        def forward(x: Tensor) -> Tensor:
            chosen = of(moe, x).topk(2).indices
            return computed(moe, x, moe.gate(x).softmax(-1).gather(1, chosen), chosen)

        moe.forward = forward


def biased(moe: Experts, x: Tensor) -> Tensor:
    return moe.gate(x).softmax(-1) + torch.tensor([0.0, 0.05, 0.0, 0.0])


def of_the_batch_before(held: list[Tensor], moe: Experts, x: Tensor) -> Tensor:
    held.append(moe.gate(x).detach())
    return held[max(len(held) - 2, 0)]


def permuted(stage: nn.Sequential) -> None:
    """Computes with the experts of a layer in another order; they are back in theirs when the step is done."""
    in_halves(stage)
    moe = stage[WRONG[1]].moe
    if dist.get_rank() == WRONG[0]:
        moe.forward = lambda x: Experts.forward(_Turned(moe), x)  # type: ignore[arg-type]


class _Turned:
    def __init__(self, moe: Experts) -> None:
        self.gate, self.experts = moe.gate, [*moe.experts][::-1]


def step(
    model: nn.Sequential, microbatches: list[Any], *, change: Change = in_halves, end: Change = nothing
) -> tuple[nn.Module, list[Tensor]]:
    stage = watch(model[2 * dist.get_rank() :][:2])
    change(stage)
    losses = OneFOneB(stage, microbatches).step()
    end(stage)
    return stage, losses


def judged(whitebox: WhiteBox, of_step: Any = step, **more: Any) -> Verdict:
    wanted = {"reference": build_model, "ranks": 2, "loss_fn": loss_fn, "contract": Contract(routers="moe")} | more
    return whitebox.validate(of_step, microbatches=pairs(4, rows=16, width=16), **wanted)


def routed(verdict: Verdict) -> None:
    """Compare what is said of the choices; how many rounding changes is the processor's."""
    golden(re.sub(r"\d+(?= of \d+ tokens| by )", "#", verdict.law("routing").note))


def test_the_same_sums_are_equal_bit_for_bit(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(step, change=nothing))
    law = verdict.law("routing")
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), verdict
    assert (law.checked, law.exact) == (16, 16)
    routed(verdict)


def test_tokens_that_change_their_expert_by_rounding_are_counted(whitebox: WhiteBox) -> None:
    with counting_judgements() as operations:
        verdict = judged(whitebox)
    assert (verdict.outcome, operations) == ("pass", [0]), verdict
    assert int(verdict.law("routing").note.partition(" ")[0]) > 0
    routed(verdict)


class Groups(Experts):
    """Sigmoid scores, a bias for the choice alone, and the best two of four groups, as in DeepSeek-V3."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.register_buffer("bias", 1e-8 * torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).sigmoid()
        scores = (shares + self.bias).view(-1, 4, 2)
        groups = scores.topk(2).values.sum(-1).topk(2, sorted=False).indices
        left = torch.zeros(len(x), 4).scatter(1, groups, 1.0).bool().unsqueeze(-1)
        chosen = scores.masked_fill(~left, -torch.inf).flatten(1).topk(2, sorted=False).indices
        weights = shares.gather(1, chosen)
        return computed(self, x, weights / weights.sum(-1, keepdim=True), chosen)


class Capacity(Experts):
    """One expert for each token, and of those that come an expert keeps the five with the largest shares."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(dim=-1)
        shares = nn.functional.one_hot(chosen, 4) * weights.unsqueeze(-1)
        kept = torch.zeros_like(shares).scatter(0, shares.topk(5, dim=0).indices, 1.0)
        one = chosen.unsqueeze(1)
        return computed(self, x, weights.unsqueeze(1) * kept.gather(1, one), one)


def built_of(kind: type[Experts]) -> nn.Sequential:
    with mock.patch("my_experts.Experts", kind):
        return build_model()


@pytest.mark.sweep
@pytest.mark.parametrize("kind", some([Groups, Capacity], left=[Capacity]))
def test_routers_of_other_kinds_need_no_more(whitebox: WhiteBox, kind: type[Experts]) -> None:
    verdict = judged(whitebox, reference=partial(built_of, kind))
    assert verdict.outcome == "pass", verdict
    routed(verdict)
    wrong = judged(whitebox, partial(step, end=cleared), reference=partial(built_of, kind))
    assert [one.kind for one in wrong.causes] == ["zero"], wrong


def nearly_tied(stack: Stack) -> nn.Module:
    model = reference_of(stack)()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("router.weight"):
                weight[1:] = weight[1] * (1 + 1e-7 * torch.randn(weight[1:].shape, generator=torch.Generator()))
    return model


def test_experts_on_several_ranks_that_drop_tokens(whitebox: WhiteBox) -> None:
    stack = Stack({"ep": 2}, ("ep",))

    def spread(model: nn.Module, given: list[Any]) -> StepResult:
        for module in model.modules():
            if isinstance(module, Mixture):
                module.router.__class__ = InHalves
        return run(model, given, stack=stack)  # type: ignore[arg-type]

    verdict = validate_stack(stack, whitebox, step=spread, reference=partial(nearly_tied, stack))
    assert verdict.outcome == "fail", "or nothing is shown below"
    verdict = whitebox.validate(
        spread,
        reference=partial(nearly_tied, stack),
        microbatches=decoder_data(stack.microbatches, stack.seed),
        ranks=stack.sizes,
        loss_fn=decoder_loss,
        contract=Contract(routers="mixture"),
    )
    assert verdict.outcome == "pass", verdict
    routed(verdict)


def scaled(stage: nn.Sequential) -> None:
    for parameter in stage.parameters():
        if parameter.grad is not None:
            parameter.grad *= 1.001


def cleared(stage: nn.Sequential) -> None:
    if dist.get_rank() == 0:
        stage[0].moe.experts[1].weight.grad.zero_()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [({"end": scaled}, "scale"), pytest.param({"end": cleared}, "zero", marks=SWEEP), ({"change": permuted}, "")],
)
def test_a_fault_beside_tokens_that_change_is_found(whitebox: WhiteBox, fault: dict[str, Change], kind: str) -> None:
    verdict = judged(whitebox, partial(step, **fault))
    assert verdict.outcome == "fail", verdict
    routed(verdict)
    assert [one.kind for one in verdict.causes] == [kind] * bool(kind), verdict


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        (biased, ""),
        pytest.param(lambda moe, x: x @ moe.gate.weight.detach().flip(0).T, "", marks=SWEEP),
        (lambda moe, x: (moe.gate(x) + 64).bfloat16(), "by scores in bfloat16, not float32"),
        pytest.param(partial(of_the_batch_before, []), "", marks=SWEEP),
    ],
    ids=["biased", "stale", "bf16", "another's"],
)
def test_tokens_that_go_to_wrong_experts_are_named(
    whitebox: WhiteBox, scores: Callable[[Experts, Tensor], Tensor], told: str
) -> None:
    verdict = judged(whitebox, partial(step, change=partial(chosen_by, scores)), reference=build_apart)
    assert (verdict.outcome, verdict.causes, len(verdict.undecided)) == ("fail", (), 1), verdict
    found = {(one.rank, one.stage, one.router) for one in verdict.mismatches if one.law == "routing"}
    assert found == {(1, 1, "3.moe")}, "and what was computed with these is not what the scores say"
    routed(verdict)
    first = verdict.mismatches[0]
    assert (first.error or 0.0) > (first.limit or 0.0) > 0.0
    assert " for token " in first.observed_text
    assert told in verdict.details, verdict


def by_sorting(stage: nn.Sequential) -> None:
    """Chooses experts by sorting, which is not observed; what is observed to be chosen is used for nothing."""
    for layer in stage:
        moe = layer.moe

        def forward(x: Tensor, moe: Experts = moe) -> Tensor:
            scores = moe.gate(x).softmax(-1)
            scores.detach().flip(-1).topk(2)
            weights, chosen = (one[:, :2] for one in scores.sort(descending=True, stable=True))
            return computed(moe, x, weights, chosen)

        moe.forward = forward


@pytest.mark.sweep
def test_choices_that_nothing_was_computed_with_decide_nothing(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(step, change=by_sorting), reference=build_wide)
    assert (verdict.outcome, verdict.law("routing").outcome) == ("pass", "pass"), verdict
    routed(verdict)


@pytest.mark.sweep
def test_only_an_explanation_plays_the_step_once_more(whitebox: WhiteBox) -> None:
    change = partial(chosen_by, biased)
    with mock.patch.object(step_verdict, "_is_right", return_value=False), counting_judgements() as operations:
        verdict = judged(whitebox, partial(step, change=change), reference=build_apart)
    assert (verdict.outcome, operations) == ("fail", [0])
    assert verdict.law("routing").outcome == verdict.law("gradient").outcome == "fail"
    assert verdict.mismatches[0].law == "routing" or verdict.causes, verdict


def shifted(at: int, change: Change, stage: nn.Sequential) -> None:
    change(stage)
    if dist.get_rank() == at:
        stage[0].forward = lambda x: type(stage[0]).forward(stage[0], x) + 0.05


@pytest.mark.sweep
def test_what_another_fault_makes_of_routes_is_no_cause(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(step, change=partial(shifted, 0, nothing)), reference=build_apart)
    assert verdict.law("routing").outcome == "fail"
    assert [(one.kind, one.rank, one.stage) for one in verdict.causes] == [("computation", 0, 0)], verdict


@pytest.mark.sweep
def test_a_stage_whose_tokens_changed_by_rounding_is_not_to_blame_for_a_later_one(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(step, change=partial(shifted, 1, in_halves)), reference=build_apart)
    assert verdict.law("routing").outcome == "fail"
    assert {one.stage for one in verdict.mismatches if one.law == "routing"} == {1}
    assert not verdict.causes, "bits of its input differ, so that nobody says"
    golden("\n".join(verdict.undecided), numbers=False)


@pytest.mark.sweep
def test_ranks_with_the_same_tokens_choose_alike(whitebox: WhiteBox) -> None:
    def whole(model: nn.Sequential, microbatches: list[Any], *, change: Change) -> tuple[nn.Module, list[float]]:
        change(model)
        return model, backward(model, microbatches, by=loss_fn)

    assert judged(whitebox, partial(whole, change=in_halves), ranks={"tp": 2}).outcome == "pass"
    of_one = partial(whole, change=lambda model: in_halves(model) if dist.get_rank() else None)
    found = [m for m in judged(whitebox, of_one, ranks={"tp": 2}).mismatches if m.law == "routing"]
    assert {(one.rank, one.beside, one.observed_text) for one in found} == {(1, 0, "other experts")}


def in_parts(model: nn.Sequential, microbatches: list[Any]) -> tuple[nn.Module, list[float]]:
    """Each rank has a part of every sequence, and the tokens come sequence first: of four rows, the first of each."""
    in_halves(model)
    own = torch.arange(16).view(4, 4).T.flatten().chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    for x, target in microbatches:
        loss = loss_fn(model(x[own]), target[own]) / dist.get_world_size()
        (loss / len(microbatches)).backward()
        losses.append(loss.detach())
    for tensor in (*losses, *(one.grad for one in model.parameters() if one.grad is not None)):
        dist.all_reduce(tensor)
    return model, [loss.item() for loss in losses]


@pytest.mark.parametrize("ranks", some([{"tp": 1}, {"sp": 2}], left=[{"tp": 1}]))
def test_tokens_may_be_in_another_order_and_in_parts(whitebox: WhiteBox, ranks: dict[str, int]) -> None:
    verdict = judged(whitebox, in_parts, ranks=ranks, reference=build_some)
    assert (verdict.outcome, verdict.law("routing").checked) == ("pass", 16), verdict
    routed(verdict)


def trained(model: nn.Sequential, operations: Iterator[tuple[str, list[Any]]]) -> Iterator[StepResult]:
    in_halves(model)
    optimizer = sgd(model)
    for operation, microbatches in operations:
        if operation == "train":
            optimizer.zero_grad()
            losses = backward(model, microbatches, by=loss_fn)
            optimizer.step()
        else:
            with torch.no_grad():
                losses = [loss_fn(model(x), target).item() for x, target in microbatches]
        yield StepResult(model, losses)


def test_each_operation_has_its_own_routes(whitebox_here: WhiteBox) -> None:
    declared = Contract(routers="moe", operations=["train", "eval"])
    verdict = judged(whitebox_here, trained, ranks=1, contract=declared, optimizer=sgd)
    assert (verdict.outcome, verdict.law("routing").checked) == ("pass", 16), verdict
    routed(verdict)


@pytest.mark.sweep
def test_held_against_itself_a_step_routes_as_it_did(whitebox: WhiteBox) -> None:
    def built(model: None, microbatches: list[Any]) -> tuple[nn.Module, list[Tensor]]:
        return step(build_model(), microbatches)

    verdict = judged(whitebox, built, reference=StageByStage(loss_fn), loss_fn=None, contract=Contract())
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), verdict
    with pytest.raises(ContractError, match="routers of the contract is not read where a step is held against itself"):
        judged(whitebox, built, reference=StageByStage(loss_fn), loss_fn=None)


@pytest.mark.sweep
def test_what_cannot_be_compared_is_said(whitebox: WhiteBox) -> None:
    with pytest.raises(WhiteBoxError, match=r"no module of the reference build_model is called 'router'; it has 0, "):
        judged(whitebox, contract=Contract(routers="router"))
    verdict = judged(whitebox, partial(step, change=nothing), contract=Contract(routers="gate"))
    assert verdict.law("routing").outcome == "not observed"
    routed(verdict)
    twice = partial(step, change=lambda stage: [stage[0].moe(torch.zeros(16, 16)) for _ in range(2)])
    routed(judged(whitebox, twice))
