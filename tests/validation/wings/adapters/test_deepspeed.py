"""What pipeproof.deepspeed knows of DeepSpeed, on an engine like its; a job's batch on it: judged, or refused."""

import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeproof
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import FlatShard
from pipeproof.wings.adapters import deepspeed
from pipeproof.wings.adapters.deepspeed import DeepSpeedError, WholeDeepSpeed
from pipeproof.wings.adapters.whole import Whole
from tests.support.golden import golden
from tests.support.like_deepspeed import (
    DualPipeVEngine,
    LayerSpec,
    PipelineEngine,
    TiedLayerSpec,
    clip_grad_norm_,
    installed,
)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


DATA = [(torch.ones(1, 2), torch.zeros(1)), (torch.full((1, 2), 2.0), torch.zeros(1))]


def twice(embedding: nn.Linear, x: Tensor) -> Tensor:
    return 2 * x @ embedding.weight


def layers() -> list[Any]:
    spec = LayerSpec(nn.Linear, 2, 2)
    return [TiedLayerSpec("w", nn.Linear, 2, 2), spec, torch.tanh, nn.Linear(2, 2), TiedLayerSpec("w", nn.Linear, 2, 2)]


def test_the_reference_has_the_names_of_a_pipeline_module() -> None:
    names = [name for name, _ in WholeDeepSpeed(layers).named_parameters()]
    assert sorted(names) == ["1.bias", "1.weight", "3.bias", "3.weight", "tied_modules.w.bias", "tied_modules.w.weight"]


def test_the_reference_calls_its_layers_one_after_the_other() -> None:
    tied = TiedLayerSpec("w", nn.Linear, 2, 2, forward_fn=twice)
    whole, x = WholeDeepSpeed(lambda: [TiedLayerSpec("w", nn.Linear, 2, 2), torch.tanh, tied]), torch.ones(1, 2)
    linear = whole.tied_modules["w"]
    assert whole(x).equal(2 * torch.tanh(linear(x)) @ linear.weight)


def test_a_first_layer_is_given_a_tuple_of_several_inputs() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    assert WholeDeepSpeed(lambda: [lambda given: given])(one, two) == (one, two)


def test_the_reference_is_cast_where_the_engine_is() -> None:
    assert {one.dtype for one in WholeDeepSpeed(layers, torch.bfloat16).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (lambda: [nn.Linear(2, 2), 3], "^layer 1 is a int: expected a module, a LayerSpec or a function$"),
        (lambda: nn.Linear(2, 2), "^the reference is a Linear: expected layers"),
        (lambda: [nn.Sequential(nn.Dropout(0.1))], r"^layer 0.0 drops out with p=0.1: set p to 0 for the check$"),
    ],
)
def test_layers_that_cannot_be_are_named(layers: Any, sentence: str) -> None:
    with pytest.raises(DeepSpeedError, match=sentence):
        WholeDeepSpeed(layers)


def test_a_batch_is_observed_and_the_engine_left_as_it_was() -> None:
    reference = WholeDeepSpeed(lambda: [nn.Linear(2, 2)])
    engine = PipelineEngine(WholeDeepSpeed(lambda: [nn.Linear(2, 2)]))
    with deepspeed.observe(engine, DATA, reference) as observed:
        engine.train_batch(observed.data_iterator)
    handed = observed.result()
    own = engine.module.get_parameter("0.weight")
    assert own.equal(reference.get_parameter("0.weight"))
    assert own.grad is None
    assert handed.gradients[own].eq(1.5).all()
    assert [one.item() for one in handed.losses] == [one.item() for one in engine.fwd_outputs]
    assert (handed.grad_norm, engine.optimizer.times) == (1.5, 1)
    assert handed.names("tied_modules.w.weight", 1, 0) == "tied_modules.w.weight"
    assert "_take_model_step" not in vars(engine)


def test_the_norm_that_clips_is_noted_where_the_engine_tells_none() -> None:
    engine = PipelineEngine(WholeDeepSpeed(lambda: [nn.Linear(2, 2)]), norm=None)
    with deepspeed.observe(engine, DATA, engine.module) as observed:
        engine.train_batch(observed.data_iterator)
    assert observed.result().grad_norm == 2.5
    assert sys.modules["deepspeed.runtime.engine"].clip_grad_norm_ is clip_grad_norm_


def test_a_reference_of_another_type_is_said_with_its_cure() -> None:
    engine = PipelineEngine(nn.Linear(2, 2, dtype=torch.bfloat16))
    sentence = (
        r"^the engine.s layers are in torch.bfloat16, the reference in torch.float32: pass dtype=torch.bfloat16 to"
    )
    with pytest.raises(DeepSpeedError, match=sentence), deepspeed.observe(engine, DATA, nn.Linear(2, 2)):
        pass


def test_a_step_that_was_not_taken_is_said() -> None:
    module = WholeDeepSpeed(lambda: [nn.Linear(2, 2)])
    with deepspeed.observe(PipelineEngine(module), DATA, module) as observed:
        pass
    with pytest.raises(DeepSpeedError, match=r"took no step: call engine\.train_batch"):
        observed.result()


def mapped(start: int, part: Tensor) -> SimpleNamespace:
    return SimpleNamespace(get_lp_grad_fragment=lambda number: part, lp_fragment_address=SimpleNamespace(start=start))


ONES, THREES = torch.ones(2, 2), torch.full((2, 2), 3.0)


@pytest.mark.parametrize(
    ("held", "replicas", "expected"),
    [
        ({}, 2, None),
        ({"grad": ONES}, 1, ONES),
        ({"grad": ONES, "_hp_grad": THREES.flatten()}, 1, THREES),  # of two the one in fp32 counts
        ({"_hp_mapping": None}, 2, (None, 0)),
        ({"_hp_mapping": mapped(2, torch.ones(2))}, 2, (torch.ones(2), 2)),
        ({"_hp_mapping": mapped(0, torch.ones(4))}, 1, ONES),
    ],
)
def test_the_gradient_is_where_the_engine_keeps_it(held: dict[str, Any], replicas: int, expected: Any) -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    for name, value in (held | {"_index_in_param_group": 0}).items():
        setattr(parameter, name, value)
    found = deepspeed.gradient_of(parameter, replicas)
    if isinstance(expected, tuple):
        assert isinstance(found, FlatShard)
        assert (found.part is None, found.start) == (expected[0] is None, expected[1])
        found, expected = found.part, expected[0]
    assert (found is None) == (expected is None)
    assert found is None or found.equal(expected)  # type: ignore[union-attr]  # a tensor


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (nn.Linear, "^the engine is a type: pipeproof.deepspeed covers PipelineEngine only$"),
        (DualPipeVEngine(nn.Linear(2, 2)), "^the engine is a DualPipeVEngine"),
        (PipelineEngine(nn.Linear(2, 2), fp16=True), "^fp16_enabled is True: pipeproof.deepspeed covers False only"),
        (PipelineEngine(nn.Linear(2, 2), is_model_parallel=True), "^is_model_parallel is True"),
        (PipelineEngine(nn.Linear(2, 2), has_moe_layers=True), "^has_moe_layers is True"),
        (PipelineEngine(nn.Linear(2, 2), batch_fn=tuple), "^the engine has a batch_fn: give microbatches as it makes"),
        (PipelineEngine(nn.Linear(2, 2), micro_batches=4), "^gradient_accumulation_steps is 4, and the step has 2"),
        (PipelineEngine(nn.Linear(2, 2), stage_id=1), "^rank 0 has stage 1, expected 0: ranks of a stage have to be"),
    ],
)
def test_what_is_not_covered_is_said(engine: Any, sentence: str) -> None:
    with pytest.raises(DeepSpeedError, match=sentence), deepspeed.observe(engine, DATA, nn.Linear(2, 2)):
        pass


def test_a_step_has_what_a_launcher_sets_and_leaves_deepspeed_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "7")
    observed: dict[str, str] = {}
    comm, ops = sys.modules["deepspeed.comm.comm"], sys.modules["deepspeed.ops"]
    comm.cdb = None  # type: ignore[attr-defined]  # DeepSpeed's

    def step(model: nn.Module, microbatches: list[Any]) -> str:
        observed.update(os.environ)
        assert not ops.__compatible_ops__["deepspeed_shm_comm"]
        comm.cdb = "made"  # type: ignore[attr-defined]  # DeepSpeed's
        return "handed"

    before = dict(os.environ)
    whole = Whole(layers, lambda: nn.Linear(2, 2), [], alone=deepspeed.as_launched)
    assert whole.run_by(step)(nn.Linear(2, 2), []) == "handed"
    assert (observed["RANK"], observed["LOCAL_RANK"], observed["LOCAL_SIZE"], observed["DS_ACCELERATOR"]) == (
        "0",
        "7",
        "2",
        "cpu",
    )
    assert dict(os.environ) == before
    assert comm.cdb is None
    assert ops.__compatible_ops__["deepspeed_shm_comm"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"microbatches": None}, "microbatches is None: expected a list of those of the step"),
        ({"dtype": "bf16"}, "dtype is 'bf16': expected a torch.dtype, as torch.bfloat16"),
        (
            {"microbatches": [(torch.ones(1, 2), (torch.zeros(1), torch.zeros(1))), torch.ones(1, 2)]},
            "microbatch 1 is a Tensor: expected a pair of inputs and labels",
        ),
    ],
)
def test_what_validate_cannot_take_is_said(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DeepSpeedError, match=re.escape(sentence)):
        deepspeed.validate(len, **{"reference": layers, "microbatches": DATA, "ranks": 2} | given)


def two_layers() -> list[Any]:
    torch.manual_seed(0)
    return [nn.Linear(2, 2), torch.tanh]


def summed(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()


def engine_of(**options: Any) -> PipelineEngine:
    made = WholeDeepSpeed(two_layers)
    with torch.no_grad():
        made.get_parameter("0.weight").fill_(0.25)  # the job has trained
    return PipelineEngine(made, **{"norm": None} | options)


def judged(engine: Any, microbatches: Any = DATA, build: Any = two_layers, drawn: Any = DATA) -> Verdict:
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
        ([(torch.ones(1, 2),)] * 2, two_layers),
        ([torch.ones(1, 2)] * 2, two_layers),
        (None, two_layers),
        (iter(DATA), two_layers),
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
    with pipeproof.deepspeed.check_step(engine, DATA, reference=two_layers, loss_fn=summed, timeout_s=5):
        engine._take_model_step("rate")
    assert vars(engine)["_take_model_step"] is own
    assert calls == ["rate"]


def test_a_batch_that_was_not_trained_is_no_pass() -> None:
    with pipeproof.deepspeed.check_step(engine_of(), DATA, reference=two_layers, loss_fn=summed, timeout_s=5) as check:
        pass
    assert check.verdict.outcome == "unknown"


def test_a_loss_function_that_the_check_was_not_given_is_named() -> None:
    engine = engine_of()
    engine.module.loss_fn = summed
    with pipeproof.deepspeed.check_step(engine, DATA, reference=two_layers, timeout_s=5) as check:
        engine.train_batch(iter(DATA))
    golden(check.verdict.details.splitlines()[0])
    del engine.module.loss_fn
    with pipeproof.deepspeed.check_step(engine, DATA, reference=two_layers, timeout_s=5) as check:
        engine.train_batch(iter(DATA))
    golden(check.verdict.details.splitlines()[0])


def test_a_source_of_microbatches_is_refused_and_left_to_the_job() -> None:
    engine, source = engine_of(), iter(DATA)
    assert judged(engine, source, drawn=DATA).outcome == "unknown"
    assert len(list(source)) == 2
