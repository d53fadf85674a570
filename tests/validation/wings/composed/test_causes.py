"""What ranks found together has a name, and a verdict does not need it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.contract import Contract
from pipeproof.core.observe.sketch import sketch
from pipeproof.core.verdict import Verdict
from pipeproof.reference.accumulation import Accumulation
from pipeproof.wings.composed import check as composed_check
from pipeproof.wings.composed import gradients as composed_gradients
from pipeproof.wings.composed.causes import not_summed
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, TOKENS, Job, Words, checked, layers

WHOLE, PART = (torch.randn(16, generator=torch.Generator().manual_seed(seed)) for seed in range(2))


@pytest.mark.parametrize(
    ("gradients", "replicas", "names", "ranks"),
    [
        ([PART, WHOLE - PART], [0, 0], "ab", (0, 1)),
        ([PART, WHOLE - PART, None, None], [0, 0, 2, 2], "a", (0, 1)),
        ([PART, WHOLE - PART], [0, 1], "a", (0, 1)),  # not added up
        ([PART, 2 * WHOLE - PART], [0, 1], "a", (0, 1)),  # nor averaged
        ([WHOLE / 2, WHOLE / 2], [0, 1], "a", ()),  # that is a factor
        ([PART, WHOLE - 1.01 * PART], [0, 0], "a", ()),
        ([PART, WHOLE - 1.01 * PART], [0, 1], "a", ()),
        ([PART, None], [0, 0], "a", ()),
    ],
)
def test_parts_that_add_up_are_not_reduced(
    gradients: list[Tensor | None], replicas: list[int], names: str, ranks: tuple[int, ...]
) -> None:
    pairs = [None if one is None else (sketch(one), sketch(WHOLE)) for one in gradients]
    causes = list(not_summed([{} if one is None else {(1, n): one for n in names} for one in pairs], replicas))
    assert [(one.kind, one.rank, one.stage) for one in causes] == [("not-reduced", 0, 1)] * bool(ranks)
    for cause in causes:
        assert cause.parameter == (names if len(names) == 1 else None)
        golden(cause.detail)


@pytest.mark.parametrize(
    ("home", "name", "fault"),
    [
        (composed_check, "explain", {"fault": lambda stage, m, given: [one * 2 for one in given]}),
        (composed_gradients.OwnGradients, "_own_causes", {"late": 2.0 * len(DATA)}),
    ],
    ids=["of the chain", "of a rank's own"],
)
def test_a_verdict_is_the_same_without_causes(
    monkeypatch: pytest.MonkeyPatch, home: Any, name: str, fault: dict[str, Any]
) -> None:
    def verdict() -> Verdict:
        contract = Contract(accumulation=Accumulation(late=True)) if "late" in fault else Contract()
        return checked(Job(layers(torch.tanh, torch.sin), **fault), contract=contract)

    named = verdict()
    monkeypatch.delattr(home, name)
    alone = verdict()
    assert (alone.outcome, alone.laws, {*alone.mismatches}) == (named.outcome, named.laws, {*named.mismatches})
    assert (alone.outcome, bool(named.causes), alone.causes) == ("fail", True, ()), str(named)


def verdict_after(change: Callable[[list[dict[str, nn.Parameter]]], None]) -> Verdict:
    torch.manual_seed(0)
    stages = [Words(sparse=True), *layers(torch.tanh, torch.sin)]
    return checked(Job(stages, TOKENS, change=lambda: change([dict(stage.named_parameters()) for stage in stages])))


@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_a_multiple_of_a_sparse_gradient_is_named(factor: float) -> None:
    def change(own: list[dict[str, nn.Parameter]]) -> None:
        words = own[0]["words.weight"]
        assert words.grad is not None
        words.grad = words.grad * factor

    (cause,) = verdict_after(change).causes
    assert (cause.kind, cause.stage, cause.factor) == ("scale", 0, pytest.approx(factor))


def exchanged(own: list[dict[str, nn.Parameter]], *names: str) -> None:
    for name in names:
        one, other = own[1][name], own[2][name]
        one.grad, other.grad = other.grad, one.grad


@pytest.mark.parametrize("names", [["layer.weight"], ["layer.weight", "layer.bias"]])
def test_exchanged_gradients_have_no_name(names: list[str]) -> None:
    verdict = verdict_after(lambda own: exchanged(own, *names))
    places = {(one.law, one.stage, one.parameter) for one in verdict.mismatches}
    assert places == {("gradient", stage, f"{stage}.{name}") for stage in (1, 2) for name in names}, str(verdict)
    assert not verdict.causes, str(verdict)
