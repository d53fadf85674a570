from collections.abc import Iterator
from types import SimpleNamespace

import torch
from nanotron import distributed as dist
from nanotron.config import LlamaConfig, ParallelismArgs
from nanotron.models import build_model as build_on_ranks
from nanotron.models.llama import LlamaForTraining
from nanotron.optim.clip_grads import clip_grad_norm
from nanotron.optim.named_optimizer import NamedOptimizer
from nanotron.parallel import ParallelContext
from nanotron.parallel.pipeline_parallel.engine import OneForwardOneBackwardPipelineEngine
from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer
from nanotron.parallel.tied_parameters import sync_tied_weights_gradients
from nanotron.trainer import mark_tied_parameters

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def build_model(context: ParallelContext) -> LlamaForTraining:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=4,
        vocab_size=64,
        max_position_embeddings=8,
    )
    parallelism = ParallelismArgs(dp=context.data_parallel_size, pp=context.pipeline_parallel_size, tp=1)
    model = build_on_ranks(lambda: LlamaForTraining(config, context, parallelism), context, torch.float32, None, DEVICE)
    mark_tied_parameters(model, context, parallelism)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def setup(pp: int, count: int) -> SimpleNamespace:
    context = ParallelContext(tensor_parallel_size=1, pipeline_parallel_size=pp, data_parallel_size=1)
    model = build_model(context)
    named = list(model.get_named_params_with_correct_tied())
    return SimpleNamespace(
        model=model,
        parallel_context=context,
        optimizer=NamedOptimizer(named, lambda groups: torch.optim.AdamW(groups, lr=1e-3)),
        grad_accumulator=None,
        pipeline_engine=OneForwardOneBackwardPipelineEngine(),
        n_micro_batches_per_batch=count,
    )


def train_step(trainer: SimpleNamespace, data_iterator: Iterator) -> None:
    model, context, sums = trainer.model, trainer.parallel_context, trainer.grad_accumulator
    count = trainer.n_micro_batches_per_batch
    batch = (next(data_iterator) for _ in range(count))
    trainer.pipeline_engine.train_batch_iter(model, context.pp_pg, batch, count, sums)
    sync_tied_weights_gradients(model, context, sums)
    clip_grad_norm(context.mp_pg, model.get_named_params_with_correct_tied(), 1.0, sums)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def data(count: int) -> list[dict]:
    every = torch.ones(2, 8, dtype=torch.bool, device=DEVICE)
    words = torch.randint(0, 64, (count, 2, 9), device=DEVICE)
    names = "input_ids", "input_mask", "label_ids", "label_mask"
    return [dict(zip(names, (one[:, :-1], every, one[:, 1:], every), strict=True)) for one in words]


def collated(microbatch: dict, trainer: SimpleNamespace) -> dict:
    model, rank = trainer.model, dist.get_rank(trainer.parallel_context.pp_pg)
    at = {name: model.output_pp_rank if "label" in name else model.input_pp_rank for name in microbatch}
    return {name: one if at[name] == rank else TensorPointer(at[name]) for name, one in microbatch.items()}
