"""Tiny causal language models of transformers', and a training step of one in stages, on CPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from transformers import AutoConfig, AutoModelForCausalLM

import pipeproof
from pipeproof import StepResult, transformers

ROWS, SEQUENCE, WORDS, WIDTH, IGNORED = 2, 8, 64, 16, -100
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
DROPOUTS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "residual_dropout")
Data = Sequence[dict[str, Tensor]]


@dataclass(frozen=True)
class Layout:
    """How a step is laid out, and what it is told.

    own: by PipelineSchedule, not by torch. rows: "padded" on the left, with positions that say so; "masked", the same
    without positions; "packed", two documents in each; or "plain".
    """

    model: str = "llama"
    schedule: str = "1F1B"
    own: bool = False
    pp: int = 2
    virtual: int = 1
    dp: int = 1
    layers: int = 4
    tied: bool = False
    dtype: str = "float32"
    loss: str = "tokens"
    clipped: bool = False
    rows: str = "padded"
    recompute: bool = False
    attention: str = "sdpa"

    @property
    def ranks(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp}

    @property
    def stages(self) -> int:
        return self.pp * self.virtual


def build(layout: Layout) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(layout.model, **SIZES, num_hidden_layers=layout.layers)
    config.tie_word_embeddings = layout.tied
    for name, value in {**dict.fromkeys(DROPOUTS, 0.0), "sliding_window": 4, "embedding_multiplier": 12.0}.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=layout.attention)
    if layout.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(getattr(torch, layout.dtype))


INPUTS = {
    "padded": ("attention_mask", "position_ids"),
    "masked": ("attention_mask",),
    "packed": ("position_ids",),
    "plain": (),
}


def names_of_inputs(layout: Layout) -> tuple[str, ...]:
    return INPUTS[layout.rows]


def data_of(layout: Layout, microbatches: int) -> Data:
    """Rows of other lengths each; paddings and prompts do not count in the loss."""
    torch.manual_seed(1)
    return [_microbatch(layout, torch.randint(3, WORDS, (ROWS, SEQUENCE)), number) for number in range(microbatches)]


def _microbatch(layout: Layout, words: Tensor, number: int) -> dict[str, Tensor]:
    labels, mask, places = words.clone(), torch.ones_like(words), torch.arange(SEQUENCE)
    labels[1, : 1 + number % 6] = IGNORED  # a prompt
    cut = 2 + number % 5
    positions = torch.where(places < cut, places, places - cut).repeat(ROWS, 1)
    if layout.rows in ("padded", "masked"):
        mask[0, : 1 + number % 4] = 0
        labels[mask == 0] = IGNORED
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
    every = {"attention_mask": mask, "position_ids": positions}
    given = {name: every[name] for name in names_of_inputs(layout)}
    return {"input_ids": words.masked_fill(mask == 0, 0), "labels": labels, **given}


def loss_fn(layout: Layout, model: Any, tokens: int, logits: Tensor, labels: Tensor) -> Tensor:
    """The model's own loss; with tokens of all microbatches it is divided by those."""
    named = {"num_items_in_batch": tokens} if layout.loss == "tokens" else {}
    loss: Tensor = model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size, **named)
    return loss


def valid_tokens(job: SimpleNamespace, data: Data) -> int:
    """Those whose label counts, shifted, in all microbatches of all replicas."""
    count = torch.tensor(sum(int((one["labels"][:, 1:] != IGNORED).sum()) for one in data))
    dist.all_reduce(count, group=job.replicas)
    return int(count)


def cut(layout: Layout, model: Any, number: int) -> nn.Module:
    return transformers.Stage(model, number, layout.stages, inputs=names_of_inputs(layout) if layout.own else ())


def made(layout: Layout, model: Any, data: Data) -> SimpleNamespace:
    """What a rank has when it begins to train."""
    mesh = init_device_mesh("cpu", (layout.pp, layout.dp), mesh_dim_names=("pp", "dp"))
    pipeline, place = mesh.get_group("pp"), mesh.get_local_rank("pp")
    job = SimpleNamespace(layout=layout, model=model, pipeline=pipeline, replicas=mesh.get_group("dp"))
    job.tokens = valid_tokens(job, data)
    job.numbers = [place + layout.pp * virtual for virtual in range(layout.virtual)]
    if layout.schedule == "ZBVZeroBubble":
        job.numbers = [place, layout.stages - 1 - place]
    job.stages = [cut(layout, model, number) for number in job.numbers]
    loss = partial(loss_fn, layout, model, job.tokens)
    if layout.own:
        tied = [{0: model_embedding(model), layout.stages - 1: "lm_head.weight"}] if layout.tied else []
        job.schedule = pipeproof.PipelineSchedule(
            kind=layout.schedule,
            n_microbatches=len(data),
            stages=job.stages,
            loss_fn=loss,
            pp_group=pipeline,
            tied=tied,
        )
        return job
    device = torch.device("cpu")
    stages = [
        PipelineStage(stage, number, layout.stages, device, group=pipeline)
        for stage, number in zip(job.stages, job.numbers, strict=True)
    ]
    schedule: Any = get_schedule_class(layout.schedule)
    several = issubclass(schedule, PipelineScheduleMulti)
    options = {"loss_fn": loss, "scale_grads": layout.loss == "mean"}
    job.schedule = schedule(stages if several else stages[0], len(data), **options)
    return job


def model_embedding(model: Any) -> str:
    """What the embedding's weight is called."""
    weight = model.get_input_embeddings().weight
    return next(name for name, one in model.named_parameters() if one is weight)


def inputs_of(job: SimpleNamespace, one: dict[str, Tensor]) -> dict[str, Tensor]:
    """What every stage is given by keyword."""
    return {name: one[name] for name in names_of_inputs(job.layout)}


def forward_backward(job: SimpleNamespace, data: Data) -> None:
    """The schedule's part of a step."""
    if job.layout.own:
        names = names_of_inputs(job.layout)
        pairs = [((one["input_ids"], *(one[name] for name in names)), one["labels"]) for one in data]
        divisor = {} if job.layout.loss == "mean" else {"loss_divisor": 1.0}
        job.schedule.train_step(pairs, max_norm=1.0 if job.layout.clipped else None, **divisor)
        return
    job.schedule.step(
        arg_mbs=[(one["input_ids"],) for one in data] if 0 in job.numbers else [()] * len(data),
        kwarg_mbs=[inputs_of(job, one) for one in data],
        target_mbs=[one["labels"] for one in data] if job.layout.stages - 1 in job.numbers else None,
        return_outputs=False,
    )


def reduce(job: SimpleNamespace) -> None:
    """Sum what replicas have, and what the copies of a tied embedding have in the first stage and in the last one."""
    for one in (one for stage in job.stages for one in stage.parameters()):
        if job.layout.dp > 1:
            dist.all_reduce(one.grad, group=job.replicas)
    if job.layout.tied and job.layout.pp > 1:
        weight = job.model.get_input_embeddings().weight
        part = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(part, group=job.pipeline)


def clip(job: SimpleNamespace) -> None:
    """Clip by the norm over all stages."""
    parameters = [one for stage in job.stages for one in stage.parameters()]
    square = nn.utils.get_total_norm([one.grad for one in parameters]) ** 2
    dist.all_reduce(square, group=job.pipeline)
    nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())


def train_step(job: SimpleNamespace, data: Data) -> None:
    forward_backward(job, data)
    if not job.layout.own:
        reduce(job)
        if job.layout.clipped:
            clip(job)


def step(layout: Layout, model: Any, microbatches: Data) -> StepResult:
    job = made(layout, model, microbatches)
    with transformers.observe(job.schedule, job.stages, model) as observed:
        train_step(job, microbatches)
    return observed.result()


def judged(layout: Layout, *, microbatches: int = 4, own_step: Any = step, whitebox: Any = None) -> Any:
    return transformers.validate(
        partial(own_step, layout),
        reference=partial(build, layout),
        microbatches=data_of(layout, microbatches * layout.dp),
        ranks=layout.ranks,
        loss=layout.loss,
        whitebox=whitebox,
    )
