"""One train_batch of a running job, on an engine that is like DeepSpeed's: judged, or refused with a sentence."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeproof
from pipeproof.core.verdict import Verdict
from pipeproof.wings.adapters.deepspeed import WholeDeepSpeed
from tests.support.golden import golden
from tests.support.like_deepspeed import DualPipeVEngine, PipelineEngine, installed


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


DATA = [(torch.ones(1, 2), torch.zeros(1)), (torch.full((1, 2), 2.0), torch.zeros(1))]


def layers() -> list[Any]:
    torch.manual_seed(0)
    return [nn.Linear(2, 2), torch.tanh]


def summed(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()


def engine_of(**options: Any) -> PipelineEngine:
    made = WholeDeepSpeed(layers)
    with torch.no_grad():
        made.get_parameter("0.weight").fill_(0.25)  # the job has trained
    return PipelineEngine(made, **{"norm": None} | options)


def judged(engine: Any, microbatches: Any = DATA, build: Any = layers, drawn: Any = DATA) -> Verdict:
    with pipeproof.deepspeed.check_step(engine, microbatches, reference=build, loss_fn=summed, timeout_s=5) as check:
        if isinstance(engine, PipelineEngine):
            engine.train_batch(iter(drawn[: engine.micro_batches]))
    assert not {"_take_model_step", "_next_batch"} & vars(engine).keys()
    return check.verdict


def test_a_batch_is_held_against_the_weights_that_the_job_has() -> None:
    engine = engine_of()
    engine.norm = 1.5  # not that of the gradients
    verdict = judged(engine)
    assert {law.name: law.outcome for law in verdict.laws if law.checked} == {
        "parameters-once": "pass",
        "loss": "pass",
        "presence": "pass",
        "gradient": "pass",
        "grad-norm": "fail",
    }
    assert engine.module.get_parameter("0.weight").eq(0.25).all()


def test_a_batch_of_other_microbatches_than_were_given_is_no_wrong_step() -> None:
    verdict = judged(engine_of(), drawn=[DATA[0], (torch.full((1, 2), 5.0), torch.zeros(1))])
    assert verdict.outcome == "unknown"
    golden(verdict.details.splitlines()[0])
    assert judged(engine_of(), drawn=DATA[:1] * 2).outcome == "fail"  # it is given, and run twice


def test_gradients_are_those_before_clipping() -> None:
    verdict = judged(engine_of())  # which clears them when it clips
    assert verdict.law("gradient").outcome == "pass"


@pytest.mark.parametrize(
    "engine",
    [
        nn.Linear(2, 2),
        DualPipeVEngine(nn.Linear(2, 2)),
        {"fp16": True},
        {"batch_fn": tuple},
        {"micro_batches": 1},
    ],
)
def test_what_is_not_covered_is_refused_and_the_job_goes_on(engine: Any) -> None:
    verdict = judged(engine_of(**engine) if isinstance(engine, dict) else engine)
    assert verdict.outcome == "unknown"
    golden(verdict.details.splitlines()[0])


@pytest.mark.parametrize(
    ("microbatches", "build"),
    [
        ([(torch.ones(1, 2),)] * 2, layers),
        ([torch.ones(1, 2)] * 2, layers),
        (None, layers),
        (iter(DATA), layers),
        (DATA, lambda: [nn.Linear(2, 2), nn.Dropout(0.1)]),
        (DATA, lambda: [nn.Linear(2, 3)]),
        (DATA, lambda: [torch.tanh, nn.Linear(2, 2)]),
    ],
)
def test_what_does_not_fit_the_job_is_said(microbatches: Any, build: Any) -> None:
    verdict = judged(engine_of(), microbatches, build)
    assert verdict.outcome == "unknown"
    golden(verdict.details.splitlines()[0])


def test_an_engine_with_a_step_of_its_own_keeps_it() -> None:
    engine, calls = engine_of(), list[Any]()
    engine._take_model_step = calls.append  # type: ignore[method-assign]  # a user's
    own = engine._take_model_step
    with pipeproof.deepspeed.check_step(engine, DATA, reference=layers, loss_fn=summed, timeout_s=5):
        engine._take_model_step("rate")
    assert vars(engine)["_take_model_step"] is own
    assert calls == ["rate"]


def test_a_batch_that_was_not_trained_is_no_pass() -> None:
    with pipeproof.deepspeed.check_step(engine_of(), DATA, reference=layers, loss_fn=summed, timeout_s=5) as check:
        pass
    assert check.verdict.outcome == "unknown"


def test_a_loss_function_that_the_check_was_not_given_is_named() -> None:
    engine = engine_of()
    engine.module.loss_fn = summed
    with pipeproof.deepspeed.check_step(engine, DATA, reference=layers, timeout_s=5) as check:
        engine.train_batch(iter(DATA))
    golden(check.verdict.details.splitlines()[0])
    del engine.module.loss_fn
    with pipeproof.deepspeed.check_step(engine, DATA, reference=layers, timeout_s=5) as check:
        engine.train_batch(iter(DATA))
    golden(check.verdict.details.splitlines()[0])


def test_a_source_of_microbatches_is_refused_and_left_to_the_job() -> None:
    engine, source = engine_of(), iter(DATA)
    assert judged(engine, source, drawn=DATA).outcome == "unknown"
    assert len(list(source)) == 2
