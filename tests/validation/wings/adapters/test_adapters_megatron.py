"""One step of a running job of Megatron's, on models that are like its: judged, or refused with a sentence."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeproof
from pipeproof.core.verdict import Verdict
from pipeproof.wings.adapters.megatron_whole import bare
from tests.support.golden import golden
from tests.support.like_megatron import forward_step_calc_loss, installed

DATA = [(torch.ones(1, 2), torch.tensor(1.0)), (torch.full((1, 2), 2.0), torch.tensor(3.0))]


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.linear = nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(**{"calculate_per_token_loss": False, "pipeline_model_parallel_size": 1} | config)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([Layer(1), Layer(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.decoder.layers:  # type: ignore[union-attr]  # a list of modules
            x = layer.linear(x)
        return x


class Optimizer:
    """As Megatron's: it clips, and tells whether it stepped, the norm, and how many zeros there were."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [*model.parameters()]

    def step(self) -> tuple[bool, float, None]:
        norm = nn.utils.get_total_norm([one.main_grad for one in self.parameters])  # type: ignore[attr-defined]  # Megatron's
        for one in self.parameters:
            one.main_grad.zero_()  # type: ignore[attr-defined]  # Megatron's
        return True, norm.item(), None


def forward_step(data: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
    inputs, tokens = next(data)
    output = bare(model)(inputs)
    if not bare(model).config.calculate_per_token_loss:
        return output, lambda output: (output.sum(), {})
    return output, lambda output: (output.sum() * tokens, tokens, {})


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


def train(model: Model, optimizer: Any, factor: float = 1.0, drawn: Any = DATA) -> None:
    """As Megatron's schedule and its finalizing do."""
    schedules = sys.modules["megatron.core.pipeline_parallel.schedules"]
    model.zero_grad()
    data = iter(drawn)
    for _ in drawn:
        loss = schedules.forward_step(forward_step, data, model, len(drawn))
        (loss * factor).backward()
    tokens = 4.0 if model.config.calculate_per_token_loss else 1.0
    for one in model.parameters():
        assert one.grad is not None
        one.main_grad, one.grad = one.grad / tokens, None  # type: ignore[attr-defined]  # Megatron's
    if optimizer is not None:
        optimizer.step()


def judged(
    model: Any,
    *,
    optimizer: Any = None,
    microbatches: Any = DATA,
    drawn: Any = DATA,
    factor: float = 1.0,
    **config: Any,
) -> Verdict:
    def reference() -> Model:
        tracker = sys.modules["megatron.core.tensor_parallel.random"]._CUDA_RNG_STATE_TRACKER
        tracker.states_["model"] = 0
        return Model(**config)

    with pipeproof.megatron.check_step(
        model, optimizer, forward_step, microbatches, reference=reference, timeout_s=5
    ) as check:
        if isinstance(model, Model):
            train(model, optimizer, factor, drawn)
    assert sys.modules["megatron.core.pipeline_parallel.schedules"].forward_step_calc_loss is forward_step_calc_loss
    assert sys.modules["megatron.core.tensor_parallel.random"]._CUDA_RNG_STATE_TRACKER.states_ == {"model": 3}
    assert sys.modules["megatron.core.parallel_state"]._DATA_PARALLEL_GROUP == "the job's"
    assert optimizer is None or "step" not in vars(optimizer)
    assert not dist.is_initialized()
    return check.verdict


@pytest.mark.parametrize("per_token", [False, True])
def test_a_right_step_passes_in_names_of_the_whole_model(per_token: bool) -> None:
    model = Model(calculate_per_token_loss=per_token)
    with torch.no_grad():
        model.get_parameter("decoder.layers.0.linear.weight").fill_(0.25)  # the job has trained
    verdict = judged(model, optimizer=Optimizer(model), calculate_per_token_loss=per_token)
    assert verdict.outcome == "pass", str(verdict)
    assert {name: verdict.law(name).checked for name in ("loss", "gradient", "grad-norm")} == {
        "loss": 2,
        "gradient": 4,
        "grad-norm": 1,
    }


def test_a_step_of_other_microbatches_than_were_given_is_no_wrong_step() -> None:
    verdict = judged(Model(), drawn=[DATA[0], (torch.full((1, 2), 5.0), torch.tensor(3.0))])
    assert verdict.outcome == "unknown"
    golden(verdict.details.splitlines()[0])
    assert judged(Model(), drawn=DATA[:1] * 2).outcome == "fail"  # it is given, and run twice


def test_without_an_optimizer_gradients_are_those_at_the_end() -> None:
    verdict = judged(Model())
    assert (verdict.outcome, verdict.law("gradient").checked) == ("pass", 4), str(verdict)


def test_a_wrong_step_is_named() -> None:
    verdict = judged(Model(), factor=2.0)
    assert verdict.outcome == "fail"
    assert verdict.law("gradient").outcome == "fail"
    assert str(verdict.mismatches[0].parameter).startswith("model.decoder.layers.1.linear")


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (Model(hidden_dropout=0.1), {}),
        (nn.Linear(2, 2), {}),
        (Model(), {"pipeline_model_parallel_size": 2}),
        (Model(), {"microbatches": None}),
    ],
)
def test_what_is_not_covered_is_refused_and_the_job_goes_on(model: Any, more: Any) -> None:
    verdict = judged(model, **more)
    assert verdict.outcome == "unknown"
    golden(verdict.details.splitlines()[0])


def test_a_step_in_which_every_token_is_masked_is_said() -> None:
    masked = [(inputs, torch.tensor(0.0)) for inputs, _ in DATA]
    told = "the loss function counts 0 tokens in all microbatches: give some of which a label is not masked"
    verdict = judged(
        Model(calculate_per_token_loss=True), microbatches=masked, drawn=masked, calculate_per_token_loss=True
    )
    assert (verdict.outcome, told in verdict.details) == ("unknown", True), str(verdict)
    with pytest.raises(pipeproof.megatron.MegatronError, match=told):
        pipeproof.megatron.validate(
            len,
            reference=lambda: Model(calculate_per_token_loss=True),
            forward_step=forward_step,
            microbatches=masked,
            ranks=1,
        )
