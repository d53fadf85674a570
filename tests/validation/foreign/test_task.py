"""What is to be validated, and what cannot be."""

from typing import Any

import pytest
import torch
from torch import nn

from pipeproof.foreign.task import Task, WhiteBoxError, name_of

GOOD: dict[str, Any] = {
    "step": lambda model, microbatches: None,
    "reference": lambda: nn.Linear(2, 2),
    "microbatches": ((torch.ones(1, 2), torch.ones(1, 2)),),
    "loss_fn": nn.functional.mse_loss,
    "loss_divisor": None,
}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"step": 3}, "step is 3: expected a function step"),
        ({"microbatches": ()}, "microbatches is empty"),
        ({"microbatches": (torch.ones(2),)}, "microbatch 0 is a Tensor: expected a pair"),
        ({"microbatches": ((torch.ones(2), "x"),)}, "microbatch 0 has a str in it"),
        ({"reference": nn.Linear(2, 2)}, "reference is a Linear: expected a function that builds it"),
        ({"loss_divisor": 0.0}, "loss_divisor is 0.0: expected a number above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WhiteBoxError, match=sentence):
        Task(**GOOD | more).check()


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [(lambda: 3, "returned a int: expected a torch.nn.Module"), (nn.Identity, "has no parameter to train")],
)
def test_a_reference_that_is_none_is_refused(reference: Any, sentence: str) -> None:
    with pytest.raises(WhiteBoxError, match=sentence):
        Task(**GOOD | {"reference": reference}).built("cpu")


def test_without_a_loss_function_the_model_gives_the_loss() -> None:
    task = Task(**GOOD | {"loss_fn": None, "microbatches": ((torch.ones(1, 2), torch.ones(1, 2)), torch.ones(3))})
    one, two = task.batches(nn.Linear(2, 2))
    assert (len(one.inputs), len(two.inputs)) == (2, 1)
    assert task.loss.function(torch.tensor(5.0), torch.empty(0)) == 5.0
    assert task.loss.divisor == 2.0
    assert name_of(test_what_makes_no_sense_is_refused) == "test_what_makes_no_sense_is_refused"
