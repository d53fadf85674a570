"""What a campaign may draw: cases as values and as text, what is reached, and words that cannot be."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from torch import nn

from pipeproof import StageByStage
from pipeproof.whitebox import Campaign, StepCase, WhiteBox
from pipeproof.whitebox.space import Space, step_cases
from tests.support.doubles import InThisProcess
from tests.support.golden import golden
from tests.support.steps import blocks

pytestmark = pytest.mark.pipeproof_one_rank

MESH = {"pp": 2, "dp": 2}


def step(model: Any, microbatches: Any, split: Sequence[int], v: int = 1, kind: str = "") -> None:
    """It is never called."""


def plain(model: Any, microbatches: Any) -> None:
    """Takes nothing by name."""


def eight() -> nn.Module:
    return blocks(8)


def data(m: int, rows: int, generator: torch.Generator) -> Any:
    return torch.ones(rows, 8), torch.ones(rows, 8)


def space(step: Callable[..., Any] = step, **words: Any) -> Space:
    return Space.of(Campaign(**words), step, eight)


EVERYTHING: Mapping[str, Any] = {
    "ranks": (4, 2, (0, 1, 0, 1), MESH),
    "dtypes": (torch.float32, torch.bfloat16),
    "options": {"v": (1, 2), "kind": ("1f1b", "a b")},
}


@pytest.mark.hypothesis
def test_a_case_is_the_text_of_its_values() -> None:
    everything = space(**EVERYTHING)
    drawn = list[StepCase]()

    @settings(suppress_health_check=list(HealthCheck), derandomize=True)  # all kinds are drawn, each time
    @given(step_cases(everything))
    def read(case: StepCase) -> None:
        drawn.append(case)
        assert everything.parse(str(case)) == case

    read()
    kinds = [{case.values[name] for case in drawn} for name in ("ranks", "dtype", "v", "kind")]
    assert kinds == [{"2", "4", "0,1,0,1", "pp2,dp2"}, {"float32", "bfloat16"}, {"1", "2"}, {"1f1b", "a b"}]
    assert {case.kinds["split"] for case in drawn} == {"even", "uneven"}
    assert {len({*case.rows}) > 1 for case in drawn} == {True, False}
    assert all(len(case.split) == everything.stages(case.ranks, case.options["v"]) for case in drawn)
    assert all(sum(case.split) == 8 for case in drawn)
    assert all(case.microbatches % 2 == 0 for case in drawn if not isinstance(case.ranks, int))


def test_ranks_that_wait_for_each_other_in_every_microbatch_may_be_any_number() -> None:
    everything = space(ranks={"pp": 2, "fsdp": 3}, microbatches=(4, 6))
    assert find(step_cases(everything), lambda case: True, settings=settings(database=None)).microbatches == 6


@pytest.mark.parametrize(
    ("where", "smallest"),
    [
        (lambda case: True, "ranks=2 microbatches=1 rows=1 split=4,4 dtype=float32 v=1 kind=1f1b seed=0"),
        (
            lambda case: case.microbatches > 2 and case.options["v"] == 2 and max(case.split) > 2,
            "ranks=2 microbatches=3 rows=1 split=1,1,1,5 dtype=float32 v=2 'kind=1f1b' seed=0",
        ),
        (
            lambda case: case.ranks == MESH,
            "ranks=pp2,dp2 microbatches=2 rows=1 split=4,4 dtype=float32 v=1 kind=1f1b seed=0",
        ),
        (
            lambda case: len({*case.rows}) > 1,
            "ranks=2 microbatches=2 rows=1,2 split=4,4 dtype=float32 v=1 kind=1f1b seed=0",
        ),
    ],
)
def test_the_smallest_case_is_plain(where: Callable[[StepCase], bool], smallest: str) -> None:
    everything = space(**EVERYTHING)
    assert find(step_cases(everything), where, settings=settings(database=None), random=Random(0)) == everything.parse(
        smallest
    )


@pytest.mark.parametrize(
    ("function", "words", "given_"),
    [
        (step, {}, {"split": (3, 5)}),
        (step, {"options": {"v": (1,)}}, {"split": (3, 5), "v": 1}),
        (plain, {}, {}),
        (
            lambda model, microbatches, *, seed, dtype: None,
            {"dtypes": (torch.float64,)},
            {"seed": 7, "dtype": torch.float64},
        ),
        (lambda model, microbatches, **named: None, {"splits": 8, "options": {"x": "1"}}, {"split": (3, 5), "x": "1"}),
        (step, {"splits": False}, {}),
    ],
)
def test_a_step_is_given_what_it_takes(function: Callable[..., Any], words: dict[str, Any], given_: Any) -> None:
    words = {**words, "options": {name: [*values] for name, values in words.get("options", {}).items()}}
    one = space(function, **words)
    texts = [
        "ranks=2 microbatches=1 rows=4 seed=7",
        *(f"{name}={value[0]}" for name, value in words["options"].items()),
    ]
    texts += ["split=3,5"] * bool(one.layers) + ["dtype=float64"] * ("dtypes" in words)
    assert one.parse(" ".join(texts)).given(one.takes) == given_


def draw_of_one(m: int) -> None:
    """Not data of three arguments."""


BAD: Mapping[str, Mapping[str, Any]] = {
    "no ranks": {"ranks": 0},
    "ranks of none": {"ranks": ()},
    "ranks by name": {"ranks": "2"},
    "an axis that there is not": {"ranks": [{"xx": 2}]},
    "no microbatches": {"microbatches": ()},
    "microbatches of none": {"microbatches": range(3)},
    "rows of none": {"rows": 0},
    "rows in words": {"rows": "four"},
    "data that is none": {"data": [1, 2]},
    "data of one argument": {"data": draw_of_one},
    "an option that the step does not take": {"options": {"virtual": (1, 2)}},
    "options without names": {"options": ["v"]},
    "an option without values": {"options": {"v": ()}},
    "an option of one value": {"options": {"v": 2}},
    "values that read alike": {"options": {"kind": ("1", 1)}},
    "half a stage": {"options": {"v": (0.5,)}},
    "an option of its own": {"options": {"split": ((4, 4),)}},
    "no cases": {"cases": 0},
    "half a case": {"cases": 0.5},
    "a seed below": {"seed": -1},
    "no time": {"seconds": 0},
    "no function": {"where": True},
    "types in words": {"dtypes": ("bf16",)},
    "types of whole numbers": {"dtypes": (torch.int64,)},
    "splits in words": {"splits": "8"},
    "no layers": {"splits": -1},
    "more stages than layers": {"ranks": (2, 16)},
    "splits that the step does not take": {"step": plain, "splits": True},
    "splits without a Sequential": {"reference": lambda: nn.Linear(2, 2)},
    "splits of stages": {"reference": StageByStage()},
    "a reference that is built": {"reference": blocks(8)},
    "a reference of nothing": {"reference": lambda: None},
    "no step": {"step": 3},
    "a word that there is not": {"rank": 2},
    "a word of a contract": {"loss_divisor": 8},
    "no campaign": {"campaign": 50},
    "no contract": {"contract": 8},
    "a contract that is not made": {"contract": lambda microbatches: None},
    "no time for a case": {"timeout_s": 0},
    "no loss function": {"loss_fn": 3},
    "a case of nothing": {"case": "x"},
    "a case of other values": {"case": "ranks=3 microbatches=1 rows=1 split=4,4 seed=0"},
    "a case of no number": {"case": "ranks=2 microbatches=two rows=1 split=4,4 seed=0"},
    "a case of other rows": {"case": "ranks=2 microbatches=1 rows=1,2 split=4,4 seed=0"},
    "a case of other layers": {"case": "ranks=2 microbatches=1 rows=1 split=4,5 seed=0"},
    "a case that cannot be read": {"case": "ranks='2"},
}


@pytest.mark.parametrize("words", BAD.values(), ids=BAD)
def test_what_cannot_be_is_refused_in_a_sentence(words: dict[str, Any]) -> None:
    given_ = {"step": step, "reference": eight, "data": data, **words}
    with pytest.raises(ValueError, match=r": ") as error:
        WhiteBox(InThisProcess()).fuzz(given_.pop("step"), **given_)
    golden(str(error.value))
