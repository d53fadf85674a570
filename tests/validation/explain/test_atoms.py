"""What gradients are made of: sums in another type than the weights, and sums that the reference does not make."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import StepResult
from pipeproof.core.observe.likeness import GRADIENT, Label
from pipeproof.core.observe.recording import Point
from pipeproof.core.verdict import Verdict
from pipeproof.explain.atoms import Update
from pipeproof.explain.attribution import Attribution, attribute, attribute_coarsely
from pipeproof.explain.likeness import plainly
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Loss, Site
from pipeproof.reference.traced import Traced
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden

WIDTH, COUNT = 16, 6


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def build() -> nn.Module:
    torch.manual_seed(2)
    blocks = (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*blocks).to(torch.bfloat16)


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 8, WIDTH, generator=draw).to(torch.bfloat16)) for _ in range(count)]  # type: ignore[misc]


def step(
    model: nn.Module, microbatches: list[Any], *, divisor: float = 0, twice: str = "", narrowed: bool = False
) -> StepResult:
    """Gradients are added up in fp32; that of the parameter ``twice`` is doubled. ``narrowed``: handed back in bf16."""
    sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    losses = []
    for x, target in microbatches:
        loss = loss_fn(model(x), target)
        (loss / (divisor or len(microbatches))).backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            sums[name] += parameter.grad
            parameter.grad = None
    if twice:
        sums[twice] *= 2
    dtype = torch.bfloat16 if narrowed else torch.float32
    return StepResult(model, losses, gradients={name: total.to(dtype) for name, total in sums.items()})


def judged(whitebox_here: WhiteBox, *, count: int = COUNT, **options: Any) -> Verdict:
    one = partial(step, **options)
    return whitebox_here.validate(one, reference=build, microbatches=data(count), ranks=1, loss_fn=loss_fn)


def test_sums_in_a_wider_type_are_compared_with_sums_in_that_type(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here)
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), verdict


def test_a_factor_of_everything_is_told_though_each_microbatch_is_hidden_by_rounding(whitebox_here: WhiteBox) -> None:
    (cause,) = judged(whitebox_here, divisor=1.0).causes
    assert (cause.kind, cause.stage, cause.factor) == ("scale", 0, COUNT)


def test_where_rounding_may_hide_a_microbatch_nothing_is_said_to_be_beyond_it(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, count=24, narrowed=True)
    assert verdict.outcome == "unknown", verdict
    (said,) = verdict.undecided
    golden(said, numbers=False)


def test_only_what_is_wrong_is_told(whitebox_here: WhiteBox) -> None:
    (cause,) = judged(whitebox_here, twice="1.1.weight").causes
    assert (cause.kind, cause.parameter, cause.factor) == ("scale", "1.1.weight", 2.0)


def test_what_a_narrow_type_can_say_is_not_rounded_where_that_type_is_due() -> None:
    observed, expected = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.015625, 4.0])
    at = Label(Point(0, -1, GRADIENT), name="bias")
    assert plainly(observed, expected.to(torch.bfloat16), at) is None
    rounded = plainly(observed, expected + 1e-4, at)
    assert rounded is not None
    assert rounded.kind == "rounded"


# What the reference gives must add up before anything is taken apart.

_OWNER = {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 1}


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def batches_of_chain() -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [Batch((torch.randn(5, 6, generator=draw),), torch.randn(5, 6, generator=draw), 5) for _ in range(3)]


def known_of_chain() -> tuple[dict[Site, Tensor], Traced]:
    """What a right step gives, and the reference."""
    model, loss = chain(), Loss(nn.functional.mse_loss, 3)
    losses = [loss.function(model(*batch.inputs), batch.target) for batch in batches_of_chain()]
    torch.stack(losses).mean().backward()
    expected = {(_OWNER[name], name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    told = [one.item() for one in losses]
    return expected, Traced(model, held=expected.keys(), batches=batches_of_chain(), loss=loss, losses=told, ends={})


def taken_apart(observed: Mapping[Site, Tensor], expected: Mapping[Site, Tensor], traced: Traced) -> Attribution:
    return attribute(Update(observed, expected, traced, placement=(0, 1)))


@pytest.mark.parametrize("factor", [-3.0, 0.25])
def test_gradients_that_the_microbatches_do_not_add_up_to_are_not_taken_apart(factor: float) -> None:
    expected, traced = known_of_chain()
    assert taken_apart(expected, expected, traced).right
    other = {site: factor * gradient if site[0] == 1 else gradient for site, gradient in expected.items()}
    told = taken_apart(other, other, traced)
    assert not told.causes
    golden("\n".join(told.unknown))


def rounded(gradients: Mapping[Site, Tensor], factor: float) -> dict[Site, Tensor]:
    """So many times as large, and rounded as bf16 rounds."""
    return {site: (factor * gradient).bfloat16().float() * (1 + 2**-9) for site, gradient in gradients.items()}


def test_what_is_computed_in_a_narrower_type_is_taken_apart_as_coarsely_where_that_explains_all() -> None:
    expected, traced = known_of_chain()
    for factor, told in ((3.0, ["scale"]), (1.0, [])):
        update = Update(rounded(expected, factor), expected, traced, placement=(0, 1))
        assert attribute(update).unknown
        assert attribute_coarsely(update) is None  # in no type that anyone knows of
        found = attribute_coarsely(replace(update, computed_in=lambda: torch.bfloat16))
        assert [cause.kind for cause in (() if found is None else found.causes)] == told
    half = {site: gradient if site[0] else gradient.flip(0) for site, gradient in rounded(expected, 3.0).items()}
    update = Update(half, expected, traced, placement=(0, 1), computed_in=lambda: torch.bfloat16)
    assert attribute_coarsely(update) is None  # one stage's are explained, and the other's are not
