"""A model cut into stages: the same function, the same names, copies of its own."""

import pytest
import torch
from torch import Tensor

from pipeproof.own.stages import Slice, layers_of, owners, tied_across
from pipeproof.reference.data import Shapes, microbatches
from pipeproof.reference.model import MODELS, build_model


@pytest.mark.parametrize("split", [(3,), (1, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_slices_in_a_row_compute_what_the_model_does(name: str, split: tuple[int, ...]) -> None:
    model = build_model(name, layers=3, seed=0)
    (batch,) = microbatches(name, count=1, shapes=Shapes(), seed=0)
    values: tuple[Tensor, ...] = batch.inputs
    for layers in layers_of(split):
        outputs = Slice(model, layers)(*values)
        values = outputs if isinstance(outputs, tuple) else (outputs,)
    assert torch.equal(values[0], model(*batch.inputs))


@pytest.mark.parametrize("name", MODELS)
def test_slices_have_the_models_names_once_each_and_tensors_of_their_own(name: str) -> None:
    model = build_model(name, layers=3, seed=0)
    slices = [Slice(model, layers) for layers in layers_of((2, 1))]
    names = [name for piece in slices for name, _ in piece.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
    for piece, (stage, _) in zip(slices, enumerate(slices), strict=True):
        for parameter, value in piece.named_parameters():
            assert owners(model, (2, 1))[parameter] == stage
            assert value is not model.get_parameter(parameter)
            assert torch.equal(value, model.get_parameter(parameter))


def test_ties_across_stages_are_found_and_ties_within_one_are_kept() -> None:
    model = build_model("gpt-tied", layers=2, seed=0)
    assert tied_across(model, (1, 1)) == [{0: "embed.token.weight", 1: "head.logits.weight"}]
    assert tied_across(model, (2,)) == []
    whole = Slice(model, range(2))
    assert whole.get_parameter("head.logits.weight") is whole.get_parameter("embed.token.weight")
    assert tied_across(build_model("gpt", layers=2, seed=0), (1, 1)) == []


def test_layers_are_dealt_out_in_order() -> None:
    assert layers_of((3, 1, 2)) == [range(3), range(3, 4), range(4, 6)]
