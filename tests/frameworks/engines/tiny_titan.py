"""A tiny Llama of torchtitan's and a training step of it, as its trainer takes one, on CPUs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims, pipeline_parallel
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.tools.utils import set_default_dtype

from pipeproof import StepResult
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.torch_pipelining import by_microbatches
from pipeproof.wings.adapters import torchtitan as adapter
from tests.frameworks.engines.groups import groups_given_back
from tests.frameworks.engines.torchtitan_layout import TorchtitanLayout

ROWS, SEQUENCE, WORDS, WIDTH, HEADS = 2, 8, 64, 16, 2
Data = Sequence[tuple[dict[str, Tensor], Tensor]]


def model_config(layers: int) -> Any:
    """Of a model with so many layers."""
    made = llama3._build_llama3_layers(
        n_layers=layers,
        dim=WIDTH,
        n_heads=HEADS,
        hidden_dim=2 * WIDTH,
        rope=ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=4 * SEQUENCE, theta=10000.0, scaling="none"),
        attn_backend="flex",
    )
    for one in made:
        one.attention.inner_attention = ScaledDotProductAttention.Config()
    return llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=WORDS,
        tok_embeddings=Embedding.Config(num_embeddings=WORDS, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=WIDTH, out_features=WORDS, param_init=llama3._output_linear_init(WIDTH)),
        layers=made,
    )


def build(layout: TorchtitanLayout) -> nn.Module:
    """The whole model, with its weights."""
    torch.manual_seed(layout.seed)
    with set_default_dtype(torch.bfloat16 if layout.bf16 else torch.float32):
        model: nn.Module = model_config(layout.layers).build()
    model.init_states()  # type: ignore[operator]  # torchtitan's
    return model


RECOMPUTATION: Mapping[str, Callable[[], Any]] = {
    "none": lambda: None,
    "full": FullAC.Config,
    "selective": SelectiveAC.Config,
}
loss_fn = CrossEntropyLoss(CrossEntropyLoss.Config())


def made(layout: TorchtitanLayout, model: nn.Module, microbatches: int) -> SimpleNamespace:
    """What torchtitan's trainer has of this rank after it was made."""
    parallel_dims.device_type = "cpu"
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=layout.pp,
        pipeline_parallel_schedule=layout.schedule,
        pipeline_parallel_microbatch_size=ROWS,
        pipeline_parallel_layers_per_stage=layout.layers_per_stage,
        pipeline_parallel_first_stage_less_layers=layout.less_first,
        pipeline_parallel_last_stage_less_layers=layout.less_last,
        data_parallel_shard_degree=layout.shard,
        data_parallel_replicate_degree=layout.replicate,
        fsdp_reshard_after_forward=layout.reshard,
        spmd_backend="partial_dtensor",
    )
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    schedule, parts, first, last = pipeline_parallel.pipeline_llm(
        model,
        parallel_dims=dims,
        training=TrainingConfig(
            local_batch_size=ROWS * microbatches,
            seq_len=SEQUENCE,
            mixed_precision_param="bfloat16" if layout.bf16 else "float32",
        ),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=RECOMPUTATION[layout.ac](),
        dump_folder="",
        device=torch.device("cpu"),
        model_config=model_config(layout.layers),
        parallelize_fn=llama3.parallelize_llama,
        loss_fn=loss_fn,
    )
    for module in (module for part in parts for module in part.modules() if isinstance(module, FSDPModule)):
        module.set_force_sum_reduction_for_comms(True)  # torchtitan divides by 1 otherwise, which gloo cannot
    return SimpleNamespace(
        parallel_dims=dims,
        pp_schedule=schedule,
        model_parts=parts,
        pp_has_first_stage=first,
        pp_has_last_stage=last,
        whole_batch=layout.whole_batch,
    )


def valid_tokens(trainer: SimpleNamespace, labels: Sequence[Tensor]) -> Tensor:
    """The tokens that count in all microbatches of all replicas, as ``Trainer.train_step`` counts them."""
    own = torch.stack([(one != IGNORE_INDEX).sum() for one in labels]).sum()
    if trainer.parallel_dims.dp_enabled:
        own = dist_utils.dist_sum_tensor(own, trainer.parallel_dims.get_mesh("batch"))
    return own


def forward_backward_step(trainer: SimpleNamespace, data: Data, tokens: Tensor) -> None:
    """As ``Trainer.pp_forward_backward_step``."""
    if trainer.whole_batch:
        together = {name: torch.cat([given[name] for given, _ in data]) for name in data[0][0]}
        words, labels = together.pop("input"), torch.cat([labels for _, labels in data])
        trainer.pp_schedule.step(
            *([words] if trainer.pp_has_first_stage else []),
            target=labels if trainer.pp_has_last_stage else None,
            losses=[] if trainer.pp_has_last_stage else None,
            loss_kwargs={"global_valid_tokens": tokens},
            return_outputs=False,
            **together,
        )
        return
    trainer.pp_schedule.step(
        arg_mbs=[(given["input"],) for given, _ in data] if trainer.pp_has_first_stage else None,
        kwarg_mbs=[{name: one for name, one in given.items() if name != "input"} for given, _ in data],
        target_mbs=[labels for _, labels in data] if trainer.pp_has_last_stage else None,
        losses=[] if trainer.pp_has_last_stage else None,
        loss_kwargs={"global_valid_tokens": tokens},
        return_outputs=False,
    )


def train_step(layout: TorchtitanLayout, trainer: SimpleNamespace, data: Data) -> None:
    """As ``Trainer.train_step``."""
    forward_backward_step(trainer, data, valid_tokens(trainer, [labels for _, labels in data]))
    if layout.clipped:
        dist_utils.clip_grad_norm_(
            [one for part in trainer.model_parts for one in part.parameters()],
            0.1,
            foreach=True,
            pp_mesh=trainer.parallel_dims.get_optional_mesh("pp"),
        )


def step(layout: TorchtitanLayout, model: nn.Module, microbatches: Data) -> StepResult:
    """The step that is judged, on this rank."""
    with groups_given_back():
        trainer = made(layout, model, len(microbatches))
        if layout.second:
            own = adapter.Torchtitan(trainer.pp_schedule, trainer.model_parts)
            own.load(own.step(), (), model)  # what a verdict is about begins here
            schedule = trainer.pp_schedule
            call = schedule.step if layout.whole_batch else partial(by_microbatches, schedule.step, schedule)
            with mock.patch.object(schedule, "step", call):  # as observed does
                train_step(layout, trainer, microbatches)
            for part in trainer.model_parts:
                part.zero_grad()
        with adapter.observe(trainer.pp_schedule, trainer.model_parts, model) as observed:
            train_step(layout, trainer, microbatches)
        return observed.result()


def data_of(microbatches: int, seed: int = 0) -> Data:
    """Packed documents: each row has two, of which positions begin anew, and labels of paddings do not count."""
    torch.manual_seed(seed + 1)
    return [_microbatch(torch.randint(0, WORDS, (ROWS, SEQUENCE + 1)), number) for number in range(microbatches)]


def _microbatch(words: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
    places = torch.arange(SEQUENCE)
    cut = 2 + number % (SEQUENCE - 3)
    positions = torch.where(places < cut, places, places - cut).repeat(ROWS, 1)
    labels = words[:, 1:].clone()
    labels[0, : number % 3] = IGNORE_INDEX
    return {"input": words[:, :-1].contiguous(), "positions": positions}, labels


def judged(
    layout: TorchtitanLayout, *, microbatches: int = 4, own_step: Any = step, whitebox: WhiteBox | None = None
) -> Verdict:
    """The verdict on a step of so many microbatches, those of all replicas."""
    return adapter.validate(
        partial(own_step, layout),
        reference=partial(build, layout),
        loss_fn=loss_fn,
        microbatches=data_of(microbatches, layout.seed),
        ranks={"pp": layout.pp, "dp": layout.dp},
        whitebox=whitebox,
    )
