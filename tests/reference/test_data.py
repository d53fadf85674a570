"""Microbatches: real text, lengths, and how many targets count."""

import pytest
import torch

from pipeproof.reference.data import IGNORED, Shapes, microbatches, text
from pipeproof.reference.model import ModelError


def test_the_text_is_real_and_long() -> None:
    assert len(text()) > 100_000
    assert "statement" in bytes(text()[:20_000].tolist()).decode("ascii")


def test_targets_are_the_next_tokens() -> None:
    (batch,) = microbatches("gpt", count=1, shapes=Shapes(rows=3, tokens=8), seed=1)
    (tokens,) = batch.inputs
    assert tokens.shape == (3, 8)
    assert torch.equal(tokens[:, 1:], batch.target[:, :-1])
    assert batch.tokens == 24


@pytest.mark.parametrize("model", ["gpt", "mlp"])
def test_lengths_differ_if_ragged_and_counts_if_unequal(model: str) -> None:
    plain = microbatches(model, count=4, shapes=Shapes(), seed=0)
    ragged = microbatches(model, count=4, shapes=Shapes(ragged=True), seed=0)
    unequal = microbatches(model, count=4, shapes=Shapes(unequal=True), seed=0)
    assert len({batch.inputs[0].shape for batch in plain}) == 1
    assert len({batch.inputs[0].shape for batch in ragged}) > 1
    assert len({batch.tokens for batch in plain}) == 1
    assert len({batch.tokens for batch in unequal}) > 1


def test_a_masked_target_does_not_count_and_some_always_do() -> None:
    for batch in microbatches("gpt", count=16, shapes=Shapes(ragged=True, unequal=True), seed=0):
        assert batch.tokens == int((batch.target != IGNORED).sum()) > 0


def test_the_seed_decides() -> None:
    one, two, other = (microbatches("gpt", count=2, shapes=Shapes(), seed=s)[1].inputs[0] for s in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_models_with_more_inputs_get_them() -> None:
    (dropout,) = microbatches("dropout", count=1, shapes=Shapes(), seed=0)
    (pair,) = microbatches("pair", count=1, shapes=Shapes(), seed=0)
    assert [tensor.is_floating_point() for tensor in dropout.inputs] == [True, False]
    assert [tensor.shape for tensor in pair.inputs] == [(4, 32), (4, 32)]


def test_fp64_leaves_integers_alone() -> None:
    (batch,) = microbatches("dropout", count=1, shapes=Shapes(), seed=0)
    assert [tensor.dtype for tensor in batch.cast(torch.float64).inputs] == [torch.float64, torch.int64]


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ModelError, match="a sequence of 65 tokens: expected 1 to 64"):
        microbatches("gpt", count=1, shapes=Shapes(tokens=65), seed=0)
