"""What a contract may say, and the sentence where it may not."""

from typing import Any

import pytest
import torch

from pipeproof import Contract, ContractError
from pipeproof.reference.accumulation import Accumulation


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"loss_divisor": 0.0}, "loss_divisor is 0.0: expected a number above 0"),
        ({"loss_divisor": float("nan")}, "loss_divisor is nan: expected a number above 0"),
        ({"loss_scale": -2}, "loss_scale is -2: expected a number above 0"),
        ({"loss_scale": True}, "loss_scale is True: expected a number above 0"),
        ({"max_norm": "1"}, "max_norm is '1': expected a number above 0"),
        ({"accumulation": torch.float32}, "accumulation is torch.float32: expected an Accumulation"),
        ({"operations": "train"}, "operations is 'train': expected a list"),
        ({"operations": 2}, "operations is 2: expected a list"),
        ({"operations": ["train", "test"]}, "operations has 'test' in it: expected some of 'train', 'accumulate'"),
        ({"operations": ["eval"]}, "operations is \\['eval'\\]: expected at least one 'train'"),
        ({"operations": ["train", "accumulate"]}, "expected 'train' after each 'accumulate'"),
        ({"operations": [("train", 0)]}, "operations has 0 microbatches for 'train': expected a number from 1"),
        ({"operations": [("train",)]}, "operations has \\('train',\\) in it"),
        ({"operations": [("train", 2), "eval"]}, "expected how many microbatches each of them has, or none"),
        ({"outputs": ["logits"]}, "outputs is \\['logits'\\]: expected a function of output and target"),
        ({"routers": 3}, "routers is 3: expected the name of the modules that choose experts"),
        ({"routers": ["a", ""]}, "routers is \\['a', ''\\]"),
        ({"names": 3}, "names is 3: expected prefixes and what replaces them, or a function of a name"),
        ({"names": {"a": 1}}, "names is {'a': 1}"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_said(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        Contract(**said)


def test_every_word_has_a_value_that_is_taken() -> None:
    said = Contract(
        loss_divisor=3,
        loss_scale=1024.0,
        accumulation=Accumulation(torch.float32),
        max_norm=float("inf"),
        operations=[["train", 3], ("eval", 1)],  # type: ignore[list-item]
        outputs=dict,
        routers="gate",
        names={"a": "b"},
    )
    assert (said.operations, said.routers) == ((("train", 3), ("eval", 1)), ("gate",))
    assert Contract(names=str.upper).plan == ("train",)
    assert isinstance(ContractError(), ValueError)


@pytest.mark.parametrize(
    ("operations", "count", "parts"),
    [
        ((), 3, [[0, 1, 2]]),
        (["train", "eval"], 4, [[0, 1], [2, 3]]),
        ([("train", 1), ("accumulate", 3), ("train", 2)], 6, [[0], [1, 2, 3], [4, 5]]),
    ],
)
def test_microbatches_are_dealt_in_order(operations: Any, count: int, parts: list[list[int]]) -> None:
    assert [[*part] for part in Contract(operations=operations).parts(count)] == parts


@pytest.mark.parametrize(
    ("operations", "sentence"),
    [
        (["train", "eval"], "3 microbatches for 2 operations: expected a multiple"),
        ([("train", 1), ("eval", 3)], "operations want 1 \\+ 3 microbatches, and there are 3"),
    ],
)
def test_microbatches_that_cannot_be_dealt_are_refused(operations: Any, sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        Contract(operations=operations).parts(3)


def test_a_word_that_nothing_reads_is_refused() -> None:
    Contract(loss_divisor=2).reads(("loss_divisor",), "here")
    with pytest.raises(ContractError, match="max_norm of the contract is not read here: say it there"):
        Contract(loss_divisor=2, max_norm=1.0).reads(("loss_divisor",), "here", "say it there")
