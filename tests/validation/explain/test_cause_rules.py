"""Layers that real models have, on one rank that holds every stage: what is said of them is true."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.steps import backward, pairs

WIDTH = 8
Change = Callable[[Any], object]


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[1] if isinstance(output, tuple) else output, target)


class Attention(nn.Module):
    """A softmax takes no notice of the bias of its keys, whose gradient is rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.query(x) @ self.key(x).T).softmax(-1) @ self.value(x)


class Beside(nn.Module):
    """One of two streams goes on as it came: the second through an encoder, the first through a decoder."""

    def __init__(self, *, decodes: bool) -> None:
        super().__init__()
        self.linear, self.decodes = nn.Linear(WIDTH, WIDTH), decodes

    def forward(self, given: Any) -> Any:
        x, y = given
        if self.decodes:
            return x, y + torch.tanh(self.linear(y) + x)
        return x + torch.tanh(self.linear(x)), y


class Translator(nn.Sequential):
    """Two streams of one input."""

    def forward(self, x: Tensor) -> Any:
        return super().forward((x, x.flip(1)))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


def judged(
    whitebox_here: WhiteBox,
    layers: Sequence[Callable[[], nn.Module]],
    *,
    before: Change = lambda model: None,
    after: Change = lambda model: None,
    exchanges: bool = False,
) -> Verdict:
    """A step in which ``before`` and ``after`` change the model, and stage 1 is called with streams exchanged."""
    translates = len(layers) == 4  # two streams

    def build() -> nn.Module:
        torch.manual_seed(0)
        return (Translator if translates else nn.Sequential)(*(layer() for layer in layers))

    def step(model: Any, microbatches: list[Any]) -> Any:
        def run(x: Any) -> Any:
            x = (x, x.flip(1)) if translates else x
            for number, stage in enumerate(model):
                x = watch(stage)(x[::-1] if exchanges and number == 1 else x)
            return x

        before(model)
        losses = backward(run, microbatches, by=loss_fn)
        after(model)
        return list(model), losses

    return whitebox_here.validate(step, reference=build, microbatches=pairs(seed=1), ranks=1, loss_fn=loss_fn)


def test_a_gradient_that_is_rounding_alone_tells_nothing_beside_another_that_is_wrong(whitebox_here: WhiteBox) -> None:
    def tripled(model: Any) -> None:
        model[1].query.weight.grad *= 3

    assert judged(whitebox_here, [Attention] * 2).outcome == "pass"
    verdict = judged(whitebox_here, [Attention] * 2, after=tripled)
    assert [(cause.kind, cause.parameter, cause.factor) for cause in verdict.causes] == [
        ("scale", "1.query.weight", 3.0)
    ]
    assert not verdict.undecided


def test_a_stage_one_of_whose_inputs_nobody_knows_was_not_called_after_another(whitebox_here: WhiteBox) -> None:
    layers = [partial(Beside, decodes=number > 1) for number in range(4)]
    verdict = judged(whitebox_here, layers, exchanges=True)
    assert verdict.outcome == "fail"
    assert "partition" not in {cause.kind for cause in verdict.causes}, str(verdict)


def test_a_part_in_evaluation_mode_is_not_said_to_be_in_the_right_one(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, [normed] * 2, before=lambda model: model[0][1].eval())
    assert verdict.outcome == "fail"
    assert "mode" not in {kind for one in verdict.ruled_out for kind in one.kinds}, str(verdict)
