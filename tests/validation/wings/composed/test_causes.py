"""What ranks found together has a name, and a verdict is the same without it."""

import pytest
import torch
from torch import Tensor

from pipeproof.core.verdict import Verdict
from pipeproof.observers.sketch import sketch
from pipeproof.wings.composed import check
from pipeproof.wings.composed.causes import not_summed
from tests.support.golden import golden
from tests.support.pipeline_here import Job, checked, layers


def test_a_verdict_is_the_same_without_its_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict() -> Verdict:
        return checked(Job(layers(torch.tanh, torch.sin), fault=lambda stage, m, given: [one * 2 for one in given]))

    named = verdict()
    monkeypatch.delattr(check, "with_causes")  # so that to ask for them raises
    alone = verdict()
    assert (named.verdict, named.laws, {*named.mismatches}) == (alone.verdict, alone.laws, {*alone.mismatches})
    assert [bool(named.cause), bool(alone.cause)] == [True, False], str(named)


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
def test_parts_that_add_up_to_the_expected_gradient_are_not_reduced(
    gradients: list[Tensor | None], replicas: list[int], names: str, ranks: tuple[int, ...]
) -> None:
    pairs = [[] if one is None else [(1, name, one) for name in names] for one in gradients]
    every = [{(stage, name): (sketch(one), sketch(WHOLE)) for stage, name, one in own} for own in pairs]
    causes = list(not_summed(every, replicas))
    assert [(one.kind, one.rank, one.stage) for one in causes] == [("not-reduced", 0, 1)] * bool(ranks)
    for cause in causes:
        assert cause.parameter == (names if len(names) == 1 else None)
        golden(cause.detail)
