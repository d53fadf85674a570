"""Nanotron's pipeline engines, beside the whole model on one device.

It needs nanotron: pip install --no-deps git+https://github.com/huggingface/nanotron &&
pip install dacite datasets einops psutil pyyaml transformers triton

It runs as it is: a toy Llama, and 1F1B on two ranks. Change what is marked CHANGE; the rest may stay.
"""

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


def my_step(model: nn.Module, microbatches: list[dict[str, Tensor]]) -> Any:
    """CHANGE 3: your trainer, and its training_step. This runs on every rank."""
    context = ParallelContext(tensor_parallel_size=1, pipeline_parallel_size=RANKS, data_parallel_size=1)
    own = build_model(context)
    optimizer = NamedOptimizer([*own.get_named_params_with_correct_tied()], torch.optim.AdamW)
    trainer = SimpleNamespace(model=own, parallel_context=context, optimizer=optimizer, grad_accumulator=None)
    engine, count = OneForwardOneBackwardPipelineEngine(), len(microbatches)
    with nanotron.observe(trainer, microbatches, model) as observed:
        engine.train_batch_iter(own, context.pp_pg, observed.data_iterator, count, None)
        sync_tied_weights_gradients(own, context, None)
        clip_grad_norm(context.mp_pg, own.get_named_params_with_correct_tied(), 1.0, None)
        optimizer.step()
    return observed.result()


def test_my_pipeline(whitebox: WhiteBox) -> None:
    """Fails, with the cause, where a loss or a gradient is not that of one device."""
    verdict = nanotron.validate(
        my_step, reference=build_model, microbatches=microbatches(), ranks=RANKS, whitebox=whitebox
    )
    verdict.raise_if_failed()
