"""What pipeproof.transformers says of what it does not cover.

``ci/frameworks`` runs this in an environment that has transformers; elsewhere it is skipped.
"""

import sys
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: ci/frameworks installs it")

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForMaskedLM, T5Config
from transformers import T5ForConditionalGeneration as T5

from pipeproof import transformers
from pipeproof.wings.adapters.framework import AdapterError
from pipeproof.wings.adapters.transformers_whole import (
    CausalLoss,
    tokens_in,
    whole_of,
)
from tests.frameworks import hf_job
from tests.frameworks.hf_job import Job
from tests.frameworks.tiny_hf import SIZES, Layout, build

WORDS = torch.ones(1, 4, dtype=torch.long)
ONE = {"input_ids": WORDS, "labels": WORDS}


def of(kind: str, **changed: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, num_hidden_layers=2, **changed))


@pytest.mark.parametrize(
    ("microbatch", "sentence"),
    [
        (WORDS, "^microbatch 1 is a Tensor: expected a mapping with input_ids and labels"),
        ({"input_ids": WORDS}, "^microbatch 1 has input_ids: expected a mapping with input_ids and labels"),
        ({**ONE, "pixel_values": WORDS}, "^microbatch 1 has pixel_values: pipeproof.transformers covers text only"),
        ({**ONE, "text": "words"}, "^microbatch 1 has a str as text: expected a tensor"),
        ({**ONE, "shift_labels": WORDS}, "^microbatch 1 has shift_labels: the model shifts labels itself"),
        ({**ONE, "past_key_values": WORDS}, "^microbatch 1 has past_key_values: a cache serves generation"),
        ({**ONE, "attention_mask": WORDS}, r"^microbatch 1 is a dict of \['attention_mask', 'input_ids'\], micro"),
    ],
)
def test_microbatches_of_another_kind_are_said(microbatch: Any, sentence: str) -> None:
    with pytest.raises(AdapterError, match=sentence):
        whole_of(lambda: None, [ONE, microbatch], "tokens")


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: nn.Linear(1, 1), "^the reference is a Linear: expected a model of transformers"),
        (lambda: of("gpt2"), r"drop.p is 0.1: set it to 0 for the check, in the config"),
        (lambda: of("llama", attention_dropout=0.5), r"attention_dropout is 0.5: set it to 0"),
        (
            lambda: T5(T5Config(**{**SIZES, "num_layers": 1})),
            "^T5ForConditionalGeneration has an encoder and a decoder",
        ),
        (
            lambda: BertForMaskedLM(BertConfig(**SIZES, num_hidden_layers=1)),
            "^BertForMaskedLM has another loss than that of a causal language model",
        ),
        (
            lambda: of("mixtral", output_router_logits=True),
            "^MixtralForCausalLM gives a loss of .* switch off what it adds, as output_router_logits=False",
        ),
    ],
)
def test_models_that_are_not_covered_are_said(model: Any, sentence: str) -> None:
    with pytest.raises(AdapterError, match=sentence):
        whole_of(model, (), "tokens").build()


def test_a_reference_that_is_no_function_is_said() -> None:
    given: Any = nn.Linear(1, 1)
    with pytest.raises(AdapterError, match="reference is a Linear: expected a function that builds it"):
        whole_of(given, (), "tokens").build()


def test_a_loss_of_another_name_and_labels_that_do_not_count_are_said() -> None:
    with pytest.raises(AdapterError, match=r"^loss is 'sum': expected 'tokens'"):
        transformers.validate(len, reference=len, microbatches=[ONE], ranks=2, loss="sum")
    with pytest.raises(AdapterError, match=r"^no label counts"):
        tokens_in([torch.tensor([[5, -100]])])


def test_the_loss_is_that_of_the_model() -> None:
    model = build(Layout())
    labels = torch.tensor([[3, 4, 5, -100]])
    output = model(input_ids=WORDS, labels=labels)
    assert CausalLoss.of(model, [labels], "mean")(output.logits, labels).equal(output.loss)
    assert CausalLoss.of(model, [labels], "tokens").tokens == 2


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "olmo", "phi", "gpt_neox", "stablelm", "cohere"])
@pytest.mark.parametrize("layers", [None, (1, 3)])
def test_stages_are_the_model_with_its_names(kind: str, layers: tuple[int, int] | None) -> None:
    model, mask = build(Layout(model=kind)), torch.tensor([[0, 1, 1, 1]])
    cuts = [None] * 3 if layers is None else [(0, 1), layers, (3, 4)]
    stages = [transformers.Stage(model, number, 3, layers=one) for number, one in enumerate(cuts)]
    made: Tensor = WORDS
    for stage in stages:
        made = stage(made, attention_mask=mask)
    assert made.equal(model(input_ids=WORDS, attention_mask=mask).logits)
    names = [name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [
        (lambda: transformers.Stage(nn.Linear(1, 1), 0, 2), "^model is a Linear: expected a causal language model"),
        (lambda: transformers.Stage(build(Layout()), 2, 2), "^stage 2 of 2: expected a number from 0 to 1"),
        (lambda: transformers.Stage(build(Layout()), 0, 5), "^5 stages of 4 layers: expected at most"),
        (
            lambda: transformers.Stage(build(Layout()), 0, 2, layers=(0, 5)),
            r"^layers is \(0, 5\): expected from and to",
        ),
        (lambda: transformers.Stage(of("bloom"), 0, 2), "^BloomForCausalLM is no .* Stage cannot cut it"),
    ],
)
def test_stages_that_cannot_be_are_said(cut: Any, sentence: str) -> None:
    with pytest.raises(AdapterError, match=sentence):
        cut()


def test_a_schedule_and_stages_of_another_kind_are_said() -> None:
    with (
        pytest.raises(AdapterError, match=r"^schedule is a int: expected one of torch.distributed.pipelining"),
        transformers.observe(3, [], nn.Linear(1, 1)),
    ):
        pass


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"bf16": True}, "bf16 is True: pipeproof.transformers covers False only"),
        ({"label_smoothing_factor": 0.1}, "label_smoother is LabelSmoother"),
        ({"neftune_noise_alpha": 1.0}, "neftune_noise_alpha is 1.0: pipeproof.transformers covers None only"),
    ],
)
def test_a_trainer_that_is_not_covered_goes_on_and_the_verdict_says_why(changed: dict[str, Any], sentence: str) -> None:
    job = Job()
    with hf_job.launched(job) as folder:
        trainer = hf_job.trainer_of(job, folder, **changed)
        with transformers.check_step(trainer) as check:
            trainer.train()
        assert trainer.state.global_step == job.checked + 2
    assert check.verdict.outcome == "unknown"
    assert sentence in check.verdict.details


def test_a_step_that_never_came_is_said() -> None:
    job = Job()
    with hf_job.launched(job) as folder:
        trainer = hf_job.trainer_of(job, folder)
        with transformers.check_step(trainer, step=9) as check:
            trainer.train()
    assert "the block took no step 9: call trainer.train in it" in check.verdict.details


@pytest.mark.parametrize("step", [-1, None, "x"])
def test_a_number_of_a_step_that_there_cannot_be_is_said_and_the_job_goes_on(step: Any) -> None:
    job = Job()
    with hf_job.launched(job) as folder:
        trainer = hf_job.trainer_of(job, folder)
        with transformers.check_step(trainer, step=step) as check:
            trainer.train()
        assert trainer.state.global_step == job.checked + 2
    assert check.verdict.outcome == "unknown"
    assert f"step is {step!r}: expected a number from 0, counted from the first in the block" in check.verdict.details


def test_without_use_nothing_of_transformers_is_imported() -> None:
    import subprocess

    told = "import sys; from pipeproof import transformers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], check=False, timeout=120).returncode == 0
