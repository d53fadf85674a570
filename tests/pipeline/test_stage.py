"""One stage: forward and backward against autograd on the whole, and stages that cannot be trained."""

import pytest
import torch
from torch import Tensor, nn

from pipeproof.pipeline.stage import Goal, ModuleStage, StageError
from tests.support.steps import loss_fn


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def test_a_middle_stage_gives_the_gradients_of_autograd() -> None:
    module = nn.Linear(3, 3)
    stage, x, upstream = ModuleStage(module, 1), leaf(2, 3), torch.randn(2, 3)
    stage.begin()
    stage.forward(0, (x,), None)
    (grad,) = stage.backward(0, (upstream,))
    expected = torch.autograd.grad(module(x), [x, module.weight, module.bias], upstream)
    assert torch.equal(grad, expected[0])
    assert torch.equal(module.weight.grad, expected[1])


def test_the_last_stage_divides_the_loss_it_differentiates_and_reports_it_undivided() -> None:
    module, x, target = nn.Linear(3, 3), leaf(2, 3), torch.randn(2, 3)
    stage = ModuleStage(module, 0)
    stage.begin()
    assert stage.forward(5, (x,), Goal(loss_fn, target, 8.0)) == ()
    stage.backward(5, ())
    (expected,) = torch.autograd.grad(loss_fn(module(x), target) / 8.0, [module.bias])
    assert torch.equal(stage.losses[5], loss_fn(module(x), target).detach())
    assert torch.equal(module.bias.grad, expected)


def test_gradients_of_several_microbatches_add_up() -> None:
    module = nn.Linear(2, 2)
    stage = ModuleStage(module, 1)
    stage.begin()
    for microbatch in range(3):
        stage.forward(microbatch, (leaf(1, 2),), None)
    for microbatch in (2, 0, 1):
        stage.backward(microbatch, (torch.ones(1, 2),))
    assert module.bias.grad.tolist() == [3.0, 3.0]


class Tuples(nn.Module):
    """Hands on two streams and an integer; the second stream does not depend on the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.a(x), self.b(y), key


def test_a_missing_output_gradient_leaves_the_parameters_behind_it_without_one() -> None:
    module = Tuples()
    stage = ModuleStage(module, 1)
    stage.begin()
    stage.forward(0, (leaf(1, 2), leaf(1, 2), torch.tensor(3)), None)
    x, y, key = stage.backward(0, (torch.ones(1, 2), None, None))
    assert x.any()
    assert y is key is None
    assert module.b.weight.grad is None


def test_a_stage_that_can_never_train_says_which_parameter_and_how_to_mend_it() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).detach()

    stage = ModuleStage(Detached(), 2)
    with pytest.raises(StageError, match=r"stage 2 can never train linear.weight: its output carries no gradient"):
        stage.forward(0, (leaf(1, 2),), None)


def test_a_wholly_frozen_stage_is_no_error() -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    stage = ModuleStage(module, 0)
    (output,) = stage.forward(0, (torch.randn(1, 2),), None)
    assert not output.requires_grad
    assert stage.backward(0, (None,)) == (None,)


@pytest.mark.parametrize(("loss", "observed"), [(lambda o, t: o, r"shape \(2, 3\)"), (lambda o, t: 1.0, "float")])
def test_a_loss_that_is_no_scalar_is_refused(loss: object, observed: str) -> None:
    with pytest.raises(StageError, match=f"loss_fn returned {observed}: expected one scalar"):
        ModuleStage(nn.Linear(3, 3), 0).forward(0, (leaf(2, 3),), Goal(loss, None, 1.0))  # type: ignore[arg-type]


def test_a_step_forgets_the_one_before() -> None:
    stage = ModuleStage(nn.Linear(2, 2), 0)
    stage.forward(0, (leaf(1, 2),), Goal(lambda o, t: o.sum(), None, 1.0))
    stage.begin()
    assert stage.losses == {}
    with pytest.raises(KeyError):
        stage.backward(0, ())
