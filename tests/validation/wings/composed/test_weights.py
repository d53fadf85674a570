"""Weights as a step begins: replicas that have others are told, and names that may stand for one weight or several.

Of weights that begin equal in several stages, only ``build=`` or the contract tells whether they are one.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import Contract
from pipeproof.core.ledger import Ledger
from pipeproof.core.verdict import Verdict
from pipeproof.records.rank_part import RankStages
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.wings.composed.weights import (
    WeightHere,
    Weights,
    enter_equal,
    enter_weights,
    equal_weights,
    explain_hand_cut,
    not_one,
    weights_apart,
    weights_here,
)
from pipeproof.wings.composed.whole import OF_REPLICAS
from tests.support.golden import golden
from tests.support.pipeline_here import Job, checked, layers, one_by_one

SAME = {(0, "a"): ("", b"1"), (0, "b"): ("[0:2]", b"2")}
OTHER = {**SAME, (0, "b"): ("[0:2]", b"9")}
HALF, OTHER_HALF = {(0, "b"): ("[0:2]", b"2")}, {(0, "b"): ("[2:4]", b"3")}


@pytest.mark.parametrize(
    ("ranks", "outcome", "apart"),
    [
        ([SAME, {**SAME, **OTHER_HALF}, SAME], "pass", []),
        ([SAME, OTHER], "fail", [(1, 0, "b")]),
        ([HALF, OTHER_HALF], "not applicable", []),
    ],
)
def test_ranks_with_one_part_begin_alike(ranks: list[Weights], outcome: str, apart: list[tuple[int, int, str]]) -> None:
    ledger = Ledger(OF_REPLICAS)
    enter_weights(ledger, ranks)
    assert [(one.rank, one.stage, one.parameter) for one in weights_apart(ledger.mismatches)] == apart
    assert [(one.rank, one.stage, one.parameter) for one in ledger.mismatches] == apart
    assert [one.outcome for one in ledger.laws() if one.name == "initial-weights"] == [outcome]


def test_one_name_of_several_weights_is_said() -> None:
    assert not not_one([SAME, {(1, "a"): ("", b"1"), (1, "b"): ("[2:4]", b"3")}, SAME])
    golden(not_one([SAME, {(1, "a"): ("", b"5"), (1, "b"): ("[0:2]", b"6")}]))


def test_weights_of_other_parts_may_differ() -> None:
    whole: list[Weights] = [{(0, "w"): ("", digest)} for digest in (b"a", b"b")]
    assert not explain_hand_cut([HALF, OTHER_HALF], [0, 0])
    assert not explain_hand_cut(whole, [0, 1])
    golden(explain_hand_cut(whole, [0, 0]))


def here(digest: str, *, constant: bool = False, part: str = "", trains: bool = True) -> WeightHere:
    return WeightHere(part, digest.encode(), constant, trains)


A, B, C = here("a"), here("b"), here("c")
RANKS = {
    "one name": ([{(0, "w"): A}, {(1, "w"): A}], {}),
    "one stage": ([{(0, "v"): A, (0, "w"): A}], {}),
    "two stages": ([{(0, "v"): A}, {(1, "w"): A}], {(0, 1): ["v", "w"]}),
    "parts": ([{(0, "v"): A, (1, "w"): A}, {(0, "v"): B, (1, "w"): C}], {}),
    "equal parts": ([{(0, "v"): A, (1, "w"): A}, {(0, "v"): B, (1, "w"): B}], {(0, 1): ["v", "w"]}),
    "several of a stage": ([{(0, "u"): A, (0, "v"): A}, {(2, "w"): A}], {(0, 2): ["u", "v", "w"]}),
}


@pytest.mark.parametrize(("ranks", "found"), RANKS.values(), ids=RANKS)
def test_weights_are_equal_where_all_ranks_parts_are(
    ranks: list[dict[tuple[int, str], WeightHere]], found: dict[tuple[int, ...], list[str]]
) -> None:
    assert equal_weights(ranks) == found


def test_only_the_compared_stage_is_in_doubt() -> None:
    for only, names in ((None, ["v", "w"]), (0, ["v", "w"]), (1, ["v", "w"]), (2, [])):
        ledger = Ledger(["presence", "gradient"])
        assert [*enter_equal(ledger, RANKS["two stages"][0], only)] == names
        assert ledger.failed == bool(names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex128])
@pytest.mark.parametrize(("begun", "constant"), [([1.0, 1.0], True), ([1.0, 2.0], False), ([1.0], True), ([], True)])
def test_weights_are_constant_in_any_type(dtype: torch.dtype, begun: list[float], constant: bool) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor(begun, dtype=dtype))
    shards = OwnShards(RankStages({0: module}, lambda stage, name: name))
    assert [one.constant for one in weights_here(shards, {}, {}).values()] == [constant]


EQUAL = "stages 0 and 2 begin with equal weights: pass build=, or say ties, which tell whether they are one"
ENDS = ("0.layer.weight", "2.layer.weight")


@dataclass
class Tied(Job):
    """The first and the last stage have copies of one weight, whose gradients may be ``added`` up."""

    added: bool = True

    def step(self) -> list[float]:
        losses = super().step()
        ends = self._ends
        whole = torch.stack([one.grad for one in ends if one.grad is not None]).sum(0)
        for one in ends if self.added else ():
            one.grad = whole.clone()
        return losses

    def norm(self) -> float:
        whole = super().norm()
        again = self._ends[1].grad if self.added else None  # of one weight, one copy counts
        return whole if again is None else math.sqrt(whole**2 - float(again.double().square().sum()))

    @property
    def _ends(self) -> list[nn.Parameter]:
        return [dict(self.stages[k].named_parameters())["layer.weight"] for k in (0, -1)]


def stages_of(begin: Callable[[nn.Module], object]) -> list[nn.Module]:
    """Three, of which the weights of the first and of the last begin so."""
    stages = layers(torch.tanh, torch.sin, torch.tanh)
    for one in (stages[0], stages[2]):
        begin(one)
    return stages


def draw(stage: nn.Module) -> None:
    nn.init.normal_(stage.layer.weight, generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr,arg-type]


def fill(stage: nn.Module, *, value: float) -> None:
    nn.init.constant_(stage.layer.weight, value)  # type: ignore[union-attr,arg-type]


def model(*, tied: bool) -> nn.Module:
    stages = layers(torch.tanh, torch.sin, torch.tanh)
    if tied:
        stages[2].layer.weight = stages[0].layer.weight  # type: ignore[union-attr]
    return nn.Sequential(*stages)


ONE, TWO = partial(model, tied=True), partial(model, tied=False)
TIED, APART = Contract(ties=[ENDS]), Contract(ties=[])
ONES, ZEROS = partial(fill, value=1.0), partial(fill, value=0.0)
TABLE: dict[str, tuple[Callable[[nn.Module], object], Callable[[], nn.Module] | Contract | None, bool, str]] = {
    "drawn, each its own": (draw, None, False, "unknown"),
    "drawn, added up": (draw, None, True, "unknown"),
    "one of the model, added up": (draw, ONE, True, "pass"),
    "one of the model, each its own": (draw, ONE, False, "fail"),
    "two of the model, each its own": (draw, TWO, False, "pass"),
    "two of the model, added up": (draw, TWO, True, "fail"),
    "one, as is said, added up": (draw, TIED, True, "pass"),
    "one, as is said, each its own": (draw, TIED, False, "fail"),
    "two, as is said, each its own": (draw, APART, False, "pass"),
    "two, as is said, added up": (draw, APART, True, "fail"),
    "ones": (ONES, None, False, "pass"),
    "zeros": (ZEROS, None, False, "pass"),
    "ones, added up": (ONES, None, True, "fail"),
}


@pytest.mark.parametrize(("begin", "build", "added", "said"), TABLE.values(), ids=TABLE)
def test_the_model_tells_which_weights_are_one(
    begin: Callable[[nn.Module], object], build: Callable[[], nn.Module] | Contract | None, added: bool, said: str
) -> None:
    told = {"contract": build} if isinstance(build, Contract) else {"build": build}
    verdict = checked(Tied(stages_of(begin), added=added), **told)
    assert verdict.outcome == said, str(verdict)
    for law in ("presence", "gradient"):
        assert verdict.law(law).left_out == (ENDS if said == "unknown" else ())
        assert (EQUAL in verdict.law(law).note) == (said == "unknown")
    assert verdict.law("grad-norm").outcome == ("not observed" if said == "fail" else said), str(verdict)
    assert ("tied-not-summed" in [one.kind for one in verdict.causes]) == (build in (ONE, TIED) and not added)


@pytest.mark.parametrize(
    ("build", "sentence"), [(None, "ties has 'x', which no"), (ONE, "ties is given beside build=")]
)
def test_ties_that_cannot_be_are_refused(build: Any, sentence: str) -> None:
    verdict = checked(Tied(stages_of(draw)), build=build, contract=Contract(ties=[(*ENDS, "x")]))
    assert (verdict.outcome, sentence in verdict.details) == ("unknown", True), str(verdict)


def test_what_else_is_wrong_still_fails() -> None:
    verdict = checked(Tied(stages_of(draw), keep=0.5, late=1.0))
    assert verdict.outcome == "fail", str(verdict)
    assert verdict.law("gradient").left_out == ENDS


@pytest.mark.parametrize(("bound", "said"), [(1.0, "unknown"), (None, "pass")])
def test_an_unknown_norm_clips_to_unknown_weights(bound: float | None, said: str) -> None:
    job = Tied(stages_of(draw))
    optimizer = torch.optim.SGD([one for stage in job.stages for one in stage.parameters()], lr=0.1)
    verdict = checked(job, then=optimizer.step, optimizer=optimizer, contract=Contract(max_norm=bound))
    assert verdict.law("updated-parameters").outcome == said, str(verdict)


def test_one_stage_is_in_doubt_with_its_weight() -> None:
    found = one_by_one(Tied(stages_of(draw)))
    assert [one.law("gradient").outcome for one in found] == ["unknown", "pass", "unknown"], "\n".join(map(str, found))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


@dataclass
class Repeated(Job):
    """Each stage has a block behind a layer of its own; gradients of the blocks are added up, but for ``alone``."""

    alone: str = "none"

    def step(self) -> list[float]:
        losses = super().step()
        blocks = [stage[1] for stage in self.stages]  # type: ignore[index]  # they are sequences
        for copies in zip(*(block.named_parameters() for block in blocks), strict=True):
            whole = torch.stack([one.grad for _, one in copies]).sum(0)
            for name, one in copies:
                one.grad = one.grad if self.alone in (name, "all") else whole.clone()
        return losses


def repeated(*blocks: nn.Module, alone: str) -> Verdict:
    job = Repeated([nn.Sequential(nn.Linear(8, 8), block) for block in blocks], alone=alone)
    return checked(job)


@pytest.mark.parametrize("alone", ["all", "norm.bias", "none"])
def test_norms_are_in_doubt_with_their_module(alone: str) -> None:
    block = Block()
    verdict = repeated(*(deepcopy(block) for _ in range(3)), alone=alone)
    assert verdict.outcome == "unknown", str(verdict)
    names = [f"{k}.1.{name}" for name, _ in block.named_parameters() for k in range(3)]
    assert sorted(verdict.law("gradient").left_out) == sorted(names)


def test_other_norms_that_were_added_are_wrong() -> None:
    verdict = repeated(Block(), Block(), alone="layer.weight")
    assert verdict.law("gradient").outcome == "fail", str(verdict)
    assert not verdict.law("gradient").left_out


@pytest.mark.parametrize(("frozen", "said"), [([2], "unknown"), ([0, 2], "pass")])
def test_weights_that_nobody_trains_may_be_equal(frozen: list[int], said: str) -> None:
    stages = stages_of(draw)
    for k in frozen:
        stages[k].layer.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
    verdict = checked(Job(stages))
    assert verdict.outcome == said, str(verdict)
