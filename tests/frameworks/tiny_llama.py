"""A tiny Llama of nanotron's and a trainer with it, as nanotron's own trainer makes them, on CPUs."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pipeproof
from pipeproof import StepResult

with pipeproof.nanotron.imports():
    from nanotron import trainer as trainers
    from nanotron.config import AdamWOptimizerArgs, LlamaConfig, LRSchedulerArgs, OptimizerArgs, ParallelismArgs
    from nanotron.helpers import init_optimizer_and_grad_accumulator, lr_scheduler_builder
    from nanotron.models import build_model
    from nanotron.models.llama import LlamaForTraining
    from nanotron.parallel import ParallelContext
    from nanotron.parallel.pipeline_parallel.engine import (
        AllForwardAllBackwardPipelineEngine,
        OneForwardOneBackwardPipelineEngine,
    )
    from nanotron.parallel.tied_parameters import get_tied_id_to_param
    from nanotron.scaling.parametrization import ParametrizationMethod

ROWS, SEQUENCE, WORDS, WIDTH = 2, 8, 32, 16
ENGINES = {"1f1b": OneForwardOneBackwardPipelineEngine, "afab": AllForwardAllBackwardPipelineEngine}


@dataclass(frozen=True)
class Layout:
    """How a step is laid out, and what it is told."""

    engine: str = "1f1b"
    pp: int = 2
    dp: int = 1
    layers: int = 4
    tied: bool = False
    bf16: bool = False
    fp32_sums: bool = False
    zero: int = 0
    ddp: bool = True
    clip: float | None = 1.0
    recompute: bool = False
    z_loss: bool = False

    @property
    def ranks(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp}


def parallelism(layout: Layout, context: Any) -> ParallelismArgs:
    return ParallelismArgs(
        dp=context.data_parallel_size,
        pp=context.pipeline_parallel_size,
        tp=1,
        pp_engine=ENGINES[layout.engine](),
        recompute_layer=layout.recompute,
    )


def build(layout: Layout, context: Any) -> LlamaForTraining:
    """The model of a rank, as ``DistributedTrainer._init_model`` makes it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=layout.layers,
        vocab_size=WORDS,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=layout.tied,
        z_loss_enabled=layout.z_loss,
        z_loss_coefficient=0.01,
    )
    parallel = parallelism(layout, context)
    model = build_model(
        model_builder=lambda: LlamaForTraining(config=config, parallel_context=context, parallel_config=parallel),
        parallel_context=context,
        dtype=torch.bfloat16 if layout.bf16 else torch.float32,
        device=torch.device("cpu"),
    )
    trainers.mark_tied_parameters(model=model, parallel_context=context, parallel_config=parallel)
    for one in model.parameters():
        nn.init.normal_(one, std=0.3)
    return model


def optimizer_args(layout: Layout) -> OptimizerArgs:
    return OptimizerArgs(
        zero_stage=layout.zero,
        weight_decay=0.01,
        clip_grad=layout.clip,
        accumulate_grad_in_fp32=layout.fp32_sums,
        learning_rate_scheduler=LRSchedulerArgs(learning_rate=0.01, lr_warmup_style="constant"),
        optimizer_factory=AdamWOptimizerArgs(adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=False),
    )


class Trainer(trainers.DistributedTrainer):
    """One that is made without a file of settings, data or checkpoints; it takes the steps of nanotron's own."""

    def __init__(self, layout: Layout, microbatches: int) -> None:
        self.parallel_context = ParallelContext(1, layout.pp, layout.dp)
        model = build(layout, self.parallel_context)
        for (_, ranks), one in get_tied_id_to_param([*model.parameters()], model).items():
            dist.all_reduce(one.data, op=dist.ReduceOp.AVG, group=self.parallel_context.world_ranks_to_pg[ranks])
        self.unwrapped_model = model
        model.module_id_to_prefix = {id(module): f"{name}." for name, module in model.named_modules()} | {id(model): ""}
        self.model = model
        if layout.dp > 1 and layout.ddp:
            self.model = DistributedDataParallel(
                model, process_group=self.parallel_context.dp_cp_pg, broadcast_buffers=False
            )
        args = optimizer_args(layout)
        self.optimizer, self.grad_accumulator = init_optimizer_and_grad_accumulator(
            parametrization_method=ParametrizationMethod.STANDARD,
            model=self.model,
            optimizer_args=args,
            parallel_context=self.parallel_context,
        )
        self.lr_scheduler = lr_scheduler_builder(self.optimizer, args.learning_rate_scheduler, 10)
        self.pipeline_engine = ENGINES[layout.engine]()
        self.n_micro_batches_per_batch = microbatches
        self.init_checkpoint_path = self.s3_mover = None
        self.config = SimpleNamespace(
            optimizer=args, general=SimpleNamespace(ignore_sanity_checks=True), checkpoints=None
        )
        self.iteration_step, self.initial_iter_step = 100, 0  # memory is told of the first steps


def data_of(microbatches: int) -> list[dict[str, Tensor]]:
    """As nanotron's collator gives them, on one rank: of every third label that of the first token counts not."""
    torch.manual_seed(1)
    made = []
    for number in range(microbatches):
        words = torch.randint(0, WORDS, (ROWS, SEQUENCE + 1))
        counts = torch.ones(ROWS, SEQUENCE, dtype=torch.bool)
        counts[:, : number % 3] = False
        made.append(
            {
                "input_ids": words[:, :-1].contiguous(),
                "input_mask": torch.ones(ROWS, SEQUENCE, dtype=torch.bool),
                "label_ids": words[:, 1:].contiguous(),
                "label_mask": counts,
            }
        )
    return made


def step(layout: Layout, model: nn.Module, microbatches: list[dict[str, Tensor]]) -> StepResult:
    trainer = Trainer(layout, len(microbatches))
    with pipeproof.nanotron.observe(trainer, microbatches, model) as observed:
        trainer.training_step(observed.data_iterator)
    return observed.result()


def adam_w(model: nn.Module) -> torch.optim.Optimizer:
    """As the trainer's, for the whole model."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)


def judged(
    layout: Layout, *, microbatches: int = 4, own_step: Any = step, updated: bool = False, whitebox: Any = None
) -> Any:
    return pipeproof.nanotron.validate(
        partial(own_step, layout),
        reference=partial(build, layout),
        microbatches=data_of(microbatches * layout.dp),
        ranks=layout.ranks,
        optimizer=adam_w if updated else None,
        whitebox=whitebox,
    )
