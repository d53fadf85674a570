"""The reference itself, against plain autograd and torch's own optimizer loop: the oracle must not be wrong alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeproof.core.limits import FP32
from pipeproof.core.tolerance import error
from pipeproof.own.stages import owners
from pipeproof.reference.data import Batch, Shapes, microbatches
from pipeproof.reference.model import MODELS, Model, build_model
from pipeproof.reference.otherwise import in_double
from pipeproof.reference.step import Loss, Recipe, Reference, objective, sgd
from tests.support.sweeps import each_once

SPLIT = (2, 1)
COUNT = 3


def data(name: str, seed: int = 0) -> list[Batch]:
    return microbatches(name, count=COUNT, shapes=Shapes(ragged=True, unequal=True), seed=seed)


def orders(order: Sequence[int] = range(COUNT)) -> dict[int, Sequence[int]]:
    return dict.fromkeys(range(len(SPLIT)), order)


def reference_of(name: str, loss: str = "mean") -> Reference:
    model = build_model(name, layers=3, seed=0)
    return Reference(model, owner=owners(model, SPLIT), recipe=Recipe(loss=loss))


def plain_step(model: Model, batches: Sequence[Batch], recipe: Recipe) -> dict[str, Tensor | None]:
    """Gradients as anybody would compute them: one loss, one backward, in fp64."""
    loss_fn, divisor = objective(model, batches, recipe)
    total: Any = sum(loss_fn(model(*batch.inputs), batch.target) for batch in batches)
    (total / divisor).backward()
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(*each_once(name=MODELS, loss=["mean", "tokens"]))
def test_gradients_are_those_of_one_plain_backward(name: str, loss: str) -> None:
    reference = reference_of(name, loss)
    plain = plain_step(
        build_model(name, layers=3, seed=0).double(), [b.cast(torch.float64) for b in data(name)], Recipe(loss=loss)
    )
    expected = reference.perform("train", data(name), orders=orders())
    for (_, parameter), gradient in expected.gradients.items():
        truth = plain[parameter]
        # 64 roundings: processors differ, and a microbatch that is missing changes thousands of times as much.
        assert gradient is truth is None or error(gradient, truth) < 64 * FP32.unit, parameter


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_end_where_torchs_own_loop_ends(name: str) -> None:
    reference = reference_of(name)
    model = build_model(name, layers=3, seed=0)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for step in range(3):
        expected = reference.perform("train", data(name, step), orders=orders())
        optimizer.zero_grad()
        plain_step(model, data(name, step), Recipe())
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1)
        optimizer.step()
        assert expected.norm == pytest.approx(norm.item(), rel=1e-5)
    for (_, parameter), value in expected.parameters.items():
        assert error(value, model.get_parameter(parameter)) < 1e-5, parameter


def test_stages_keep_their_shares_of_a_tied_weight_apart() -> None:
    (first, *_) = reference_of("gpt-tied").perform("train", data("gpt-tied"), orders=orders()).contributions
    assert not torch.equal(first.gradients[0, "embed.token.weight"], first.gradients[1, "head.logits.weight"])


def test_accumulation_adds_two_calls_and_is_used_once() -> None:
    one, two = reference_of("mlp"), reference_of("mlp")
    one.perform("accumulate", data("mlp"), orders=orders())
    both = one.perform("train", data("mlp"), orders=orders())
    single = two.perform("train", data("mlp"), orders=orders())
    site = (1, "blocks.2.linear.bias")
    assert error(both.gradients[site], 2 * single.gradients[site]) < 1e-6  # type: ignore[arg-type, operator]
    after = one.perform("train", data("mlp"), orders=orders())
    assert error(after.gradients[site], both.gradients[site]) > 0.1  # type: ignore[arg-type]


def test_what_a_step_must_give_can_be_had_without_an_update() -> None:
    one, two = reference_of("gpt-tied"), reference_of("gpt-tied")
    weights = {name: parameter.detach().clone() for name, parameter in one.model.named_parameters()}
    backwards, batches = orders(list(reversed(range(COUNT)))), data("gpt-tied")
    expected = one.before_update(batches, tuple(one.contributing(batches)), orders=backwards)
    trained = two.perform("train", batches, orders=backwards)
    assert (expected.losses, expected.loss, expected.norm) == (trained.losses, trained.loss, trained.norm)
    assert expected.gradients.keys() == trained.gradients.keys()
    assert all(torch.equal(expected.gradients[site], part) for site, part in trained.gradients.items())  # type: ignore[arg-type]
    assert all(torch.equal(parameter, weights[name]) for name, parameter in one.model.named_parameters())


def test_the_sum_of_one_microbatch_is_not_added_onto_in_place() -> None:
    reference, batches = reference_of("mlp"), data("mlp")[:1]
    first = reference.perform("accumulate", batches, orders=orders([0])).contributions[0]
    kept = {site: part.clone() for site, part in first.gradients.items() if part is not None}
    reference.perform("train", batches, orders=orders([0]))
    assert all(torch.equal(first.gradients[site], part) for site, part in kept.items())  # type: ignore[arg-type]


def test_evaluation_changes_nothing_and_drops_nothing_out() -> None:
    one, two = reference_of("dropout"), reference_of("dropout")
    (first, *_) = one.perform("eval", data("dropout"), orders=orders()).losses
    assert one.model.training
    trained = one.perform("train", data("dropout"), orders=orders())
    assert first != trained.losses[0]
    assert trained.losses == two.perform("train", data("dropout"), orders=orders()).losses


def test_fp64_starts_from_the_parameters_that_the_operation_started_from() -> None:
    reference = reference_of("gpt-tied")
    reference.perform("train", data("gpt-tied"), orders=orders())
    second = reference.perform("train", data("gpt-tied", 1), orders=orders())
    for fp32, fp64 in zip(second.contributions, in_double(reference, second, data("gpt-tied", 1)), strict=True):
        assert fp64.loss == pytest.approx(fp32.loss, rel=1e-5)
        for site, gradient in fp32.gradients.items():
            wide = fp64.gradients[site]
            assert wide.dtype is torch.float64
            assert error(gradient, wide) < 1e-5


def test_a_module_that_is_in_every_stage_has_one_gradient_everywhere() -> None:
    torch.manual_seed(0)
    one = torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(one, torch.nn.Tanh(), one)
    weights = [p.detach().clone() for p in model.parameters()]
    owner = {name: int(name[0]) // 2 for name, _ in model.named_parameters(remove_duplicate=False)}
    batches = [Batch((torch.randn(2, 4),), torch.randn(2, 4), 2) for _ in range(COUNT)]
    recipe = Recipe(loss=Loss(torch.nn.functional.mse_loss, float(COUNT)))
    reference = Reference(model, owner=owner, recipe=recipe)
    right = sum(torch.nn.functional.mse_loss(model(b.inputs[0]), b.target) / COUNT for b in batches)
    gradients = torch.autograd.grad(right, list(one.parameters()))
    expected = reference.before_update(batches, reference.contribute(batches), orders=orders())
    assert all(p is q for p, q in zip(one.parameters(), model.parameters(), strict=True))
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))
    for (_, name), gradient in expected.gradients.items():
        assert error(gradient, gradients["bias" in name]) < 1e-6, name
