"""A causal language model of transformers' in stages, beside the whole model on one device.

It needs transformers: pip install transformers==5.23.0 accelerate==1.15.0

It runs as it is: a toy Llama, and torch's 1F1B on two ranks. Change what is marked CHANGE; the rest may stay.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pipeproof import transformers
from pipeproof.whitebox import WhiteBox

with transformers.imports():  # your own modules that import transformers belong here, too
    from transformers import AutoModelForCausalLM, LlamaConfig

RANKS, WORDS, SEQUENCE, ROWS, IGNORED = 2, 64, 8, 2, -100


def build_model() -> Any:
    """CHANGE 1: the whole model. Two calls must give the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


def microbatches() -> list[dict[str, Tensor]]:
    """CHANGE 2: the data, as a data collator gives it. The first rows are padded on the left."""
    torch.manual_seed(1)
    mask = torch.ones(ROWS, SEQUENCE, dtype=torch.long)
    mask[0, :2] = 0
    words = [torch.randint(1, WORDS, (ROWS, SEQUENCE)) for _ in range(4)]
    return [{"input_ids": one, "attention_mask": mask, "labels": one.masked_fill(mask == 0, IGNORED)} for one in words]


def setup(model: Any, microbatches: list[dict[str, Tensor]]) -> tuple[Any, Any]:
    """CHANGE 3: your stages, your schedule and, below, your step."""
    rank = dist.get_rank()
    tokens = sum(int((one["labels"][:, 1:] != IGNORED).sum()) for one in microbatches)

    def loss_fn(logits: Tensor, labels: Tensor) -> Any:
        return model.loss_function(logits=logits, labels=labels, vocab_size=WORDS, num_items_in_batch=tokens)

    stage = transformers.Stage(model, rank, RANKS)
    place = PipelineStage(stage, rank, RANKS, model.device)
    return stage, Schedule1F1B(place, len(microbatches), loss_fn=loss_fn, scale_grads=False)


def train_step(stage: Any, schedule: Any, microbatches: list[dict[str, Tensor]]) -> None:
    """Your own, as your job takes it."""
    schedule.step(
        arg_mbs=[(one["input_ids"],) for one in microbatches] if stage.is_first else [()] * len(microbatches),
        kwarg_mbs=[{"attention_mask": one["attention_mask"]} for one in microbatches],
        target_mbs=[one["labels"] for one in microbatches] if stage.is_last else None,
        return_outputs=False,
    )


def my_step(model: Any, microbatches: list[dict[str, Tensor]]) -> Any:
    """The step that is judged, on every rank."""
    stage, schedule = setup(model, microbatches)
    with transformers.observe(schedule, [stage], model) as observed:
        train_step(stage, schedule, microbatches)
    return observed.result()


def test_my_pipeline(whitebox: WhiteBox) -> None:
    """Fails, with the cause, where a loss or a gradient is not the whole model's."""
    verdict = transformers.validate(
        my_step, reference=build_model, microbatches=microbatches(), ranks=RANKS, whitebox=whitebox
    )
    verdict.raise_if_failed()
