"""Nanotron's pipeline engines, beside the whole model on one device.

It needs nanotron: pip install --no-deps git+https://github.com/huggingface/nanotron &&
pip install dacite datasets einops psutil pyyaml transformers triton

It runs as it is: a toy Llama, and 1F1B on two ranks. Change what is marked CHANGE; the rest may stay.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof import nanotron
from pipeproof.whitebox import WhiteBox

with nanotron.imports():  # your own modules that import nanotron belong here, too
    from nanotron.config import LlamaConfig, ParallelismArgs
    from nanotron.models import build_model as build_on_ranks
    from nanotron.models.llama import LlamaForTraining
    from nanotron.optim.clip_grads import clip_grad_norm
    from nanotron.optim.named_optimizer import NamedOptimizer
    from nanotron.parallel import ParallelContext
    from nanotron.parallel.pipeline_parallel.engine import OneForwardOneBackwardPipelineEngine
    from nanotron.parallel.tied_parameters import sync_tied_weights_gradients
    from nanotron.trainer import mark_tied_parameters

RANKS, WORDS, SEQUENCE, ROWS = 2, 64, 8, 2
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def build_model(context: ParallelContext) -> Any:
    """CHANGE 1: the model, for a ParallelContext of any size. Two calls must give the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=4,
        vocab_size=WORDS,
        max_position_embeddings=SEQUENCE,
    )
    parallelism = ParallelismArgs(dp=context.data_parallel_size, pp=context.pipeline_parallel_size, tp=1)
    model = build_on_ranks(lambda: LlamaForTraining(config, context, parallelism), context, torch.float32, None, DEVICE)
    mark_tied_parameters(model, context, parallelism)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def microbatches() -> list[dict[str, Tensor]]:
    """CHANGE 2: the data, all that the model's forward takes, by name."""
    torch.manual_seed(1)
    every = torch.ones(ROWS, SEQUENCE, dtype=torch.bool)
    words = torch.randint(0, WORDS, (4, ROWS, SEQUENCE + 1))
    names = "input_ids", "input_mask", "label_ids", "label_mask"
    return [dict(zip(names, (one[:, :-1], every, one[:, 1:], every), strict=True)) for one in words]


def setup(count: int) -> Any:
    """CHANGE 3: your trainer and, below, its training_step."""
    context = ParallelContext(tensor_parallel_size=1, pipeline_parallel_size=RANKS, data_parallel_size=1)
    model = build_model(context)
    return SimpleNamespace(
        model=model,
        parallel_context=context,
        optimizer=NamedOptimizer([*model.get_named_params_with_correct_tied()], torch.optim.AdamW),
        grad_accumulator=None,
        pipeline_engine=OneForwardOneBackwardPipelineEngine(),
        n_micro_batches_per_batch=count,
    )


def train_step(trainer: Any, data_iterator: Iterator[Any]) -> None:
    """Your own, as your job takes it."""
    model, context, count = trainer.model, trainer.parallel_context, trainer.n_micro_batches_per_batch
    trainer.pipeline_engine.train_batch_iter(model, context.pp_pg, data_iterator, count, None)
    sync_tied_weights_gradients(model, context, None)
    clip_grad_norm(context.mp_pg, model.get_named_params_with_correct_tied(), 1.0, None)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def my_step(model: nn.Module, microbatches: list[dict[str, Tensor]]) -> Any:
    """The step that is judged, on every rank."""
    trainer = setup(len(microbatches))
    with nanotron.observe(trainer, microbatches, model) as observed:
        train_step(trainer, observed.data_iterator)
    return observed.result()


def test_my_pipeline(whitebox: WhiteBox) -> None:
    """Fails, with the cause, where a loss or a gradient is not that of one device."""
    verdict = nanotron.validate(
        my_step, reference=build_model, microbatches=microbatches(), ranks=RANKS, whitebox=whitebox
    )
    verdict.raise_if_failed()
