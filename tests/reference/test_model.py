"""The reference's models: what each has that the others have not."""

import pytest
import torch

from pipeproof.reference.data import Shapes, microbatches
from pipeproof.reference.model import GPT, MODELS, ModelError, Stack, build_model


@pytest.mark.parametrize("name", MODELS)
def test_weights_follow_from_the_seed_alone(name: str) -> None:
    torch.manual_seed(123)
    one = build_model(name, layers=2, seed=5)
    torch.manual_seed(456)
    two, other = build_model(name, layers=2, seed=5), build_model(name, layers=2, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_every_piece_belongs_to_one_layer(name: str) -> None:
    model = build_model(name, layers=3, seed=0)
    pieces = [piece for layer in model.layers for piece in layer]
    owned = [name for piece in pieces for name, _ in model.get_submodule(piece).named_parameters(prefix=piece)]
    assert len(model.layers) == 3
    assert set(owned) >= {name for name, _ in model.named_parameters()}
    assert len(set(pieces)) == len(pieces)


def test_a_tied_gpt_has_one_weight_under_two_names() -> None:
    model = build_model("gpt-tied", layers=1, seed=0)
    assert model.get_parameter("head.logits.weight") is model.get_parameter("embed.token.weight")
    assert len(list(GPT(1, tied=False).parameters())) == len(list(model.parameters())) + 1


def test_a_frozen_model_has_one_parameter_that_is_not_trained() -> None:
    frozen = [name for name, p in build_model("frozen", layers=4, seed=0).named_parameters() if not p.requires_grad]
    assert frozen == ["blocks.2.linear.weight"]


def test_dropout_follows_from_the_key_and_not_from_what_was_drawn_before() -> None:
    model = build_model("dropout", layers=2, seed=0)
    one, two = microbatches("dropout", count=2, shapes=Shapes(), seed=0)
    first = model(*one.inputs)
    model(*two.inputs)
    assert torch.equal(model(*one.inputs), first)
    x, key = one.inputs
    assert not torch.equal(model(x, key + 1), first)
    model.eval()
    assert torch.equal(model(x, key), model(x, key + 1))


def test_the_last_pair_leaves_parameters_unused() -> None:
    model = build_model("pair", layers=2, seed=0)
    (batch,) = microbatches("pair", count=1, shapes=Shapes(), seed=0)
    model.mean_loss(model(*batch.inputs), batch.target).backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert unused == ["blocks.1.other.weight", "blocks.1.other.bias"]


def test_a_mean_is_a_sum_over_what_counts() -> None:
    for name in ("gpt", "mlp"):
        model = build_model(name, layers=1, seed=0)
        (batch,) = microbatches(name, count=1, shapes=Shapes(unequal=True), seed=0)
        output = model(*batch.inputs)
        mean, total = model.mean_loss(output, batch.target), model.sum_loss(output, batch.target)
        assert mean.item() == pytest.approx(total.item() / batch.tokens, rel=1e-6)


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ModelError, match="unknown model 'lstm': known are gpt, gpt-tied"):
        build_model("lstm", layers=1, seed=0)
    with pytest.raises(ModelError, match="layers is 0"):
        build_model("mlp", layers=0, seed=0)
    with pytest.raises(ModelError, match="unknown dtype 'fp16': known are fp32, bf16, fp64"):
        build_model("mlp", layers=1, seed=0, dtype="fp16")
    assert isinstance(build_model("mlp", layers=1, seed=0), Stack)
