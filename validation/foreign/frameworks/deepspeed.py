"""DeepSpeed's PipelineEngine under ``whitebox.validate``: where its losses, gradients, norm and names are.

A user's step makes its engine as ever and calls ``train_batch`` inside ``observed``. ``validate`` takes the reference
from the same layers. Nothing of DeepSpeed is imported before one of these is called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.foreign.frameworks.deepspeed_whole import DEEPSPEED, DeepSpeedError, WholeDeepSpeed, loss_of_layers
from pipeproof.foreign.frameworks.drawn import Drawn
from pipeproof.foreign.frameworks.framework import Named, OfMicrobatch, around, launched
from pipeproof.foreign.frameworks.framework_step import FrameworkStep, Observation, Sight, observing, telling
from pipeproof.foreign.handed_back import FlatShard, Gradient
from pipeproof.foreign.validator import WhiteBox
from pipeproof.reference.accumulation import Accumulation

# By what the engine calls them: attributes, or methods that tell.
_COVERED = {
    "is_model_parallel": False,
    "has_moe_layers": False,
    "fp16_enabled": False,
    "torch_autocast_enabled": False,
    "zero_cpu_offload": False,
    "random_ltd_enabled": False,
    "curriculum_learning_enabled": False,
    "is_deepcompile_enabled": False,
    "managed_gradient_accumulation": True,
}


def sum_of(parameter: nn.Parameter) -> Tensor | None:
    """What the engine adds gradients to, where that is the whole: with bf16, flat and of a type of its own."""
    whole: Tensor | None = getattr(parameter, "_hp_grad", None)
    return parameter.grad if whole is None else whole


def gradient_of(parameter: nn.Parameter, replicas: int) -> Gradient:
    """The gradient that the engine's optimizer is about to take, where the engine has it.

    With ZeRO-1, each of several replicas has a part.
    """
    whole = sum_of(parameter)
    if whole is not None:
        return whole.detach().view_as(parameter)
    if not hasattr(parameter, "_hp_mapping"):
        return None
    mapping: Any = parameter._hp_mapping
    if mapping is None:
        return FlatShard(None)
    part: Tensor = mapping.get_lp_grad_fragment(parameter._index_in_param_group).detach()  # type: ignore[attr-defined]  # DeepSpeed's
    return part.view_as(parameter) if replicas == 1 else FlatShard(part.flatten(), mapping.lp_fragment_address.start)


def gradients_of(engine: Any) -> dict[nn.Parameter, Gradient]:
    """All of them on this rank."""
    replicas = engine.grid.data_parallel_size
    return {one: gradient_of(one, replicas) for one in engine.module.parameters() if one.requires_grad}


@contextmanager
def _watching(engine: Any, drawn: Drawn, sight: Sight) -> Iterator[None]:
    """While this is open, note what is ``drawn``, tell ``sight`` when the optimizer is about to step, and the norm."""
    clipped_by = list[Any]()  # in fp32 without ZeRO, where the engine tells nobody

    def next_batch(draw: Any) -> Any:
        batch = draw()
        drawn.note(batch)
        return batch

    def clipping(clip: Any, *given: Any, **named: Any) -> Any:
        clipped_by[:] = [clip(*given, **named)]
        return clipped_by[0]

    def taking(step: Any, *given: Any, **named: Any) -> Any:
        clipped_by.clear()
        with around(DEEPSPEED.module("runtime.engine"), "clip_grad_norm_", clipping):
            return step(*given, **named)

    def norm(_: Any) -> Any:
        told = engine.get_global_grad_norm()
        return next(iter(clipped_by), None) if told is None else told

    with (
        around(engine, "_take_model_step", taking),
        around(engine, "_take_model_step", telling(sight, norm)),
        around(engine, "_next_batch", next_batch),
    ):
        yield


def step_of(engine: Any) -> FrameworkStep:
    """The engine's step on this rank; raises ``DeepSpeedError`` for what is not covered."""
    check_covered(engine)
    drawn = Drawn()
    return FrameworkStep(
        {engine.stage_id: engine.module},
        lambda stage, name: name,  # those of a PipelineModule are the reference's
        partial(gradients_of, engine),
        lambda: engine.fwd_outputs,
        partial(_watching, engine, drawn),
        unfinished=DeepSpeedError("the engine took no step: call engine.train_batch in the block"),
        drawn=drawn,
        sum_of=sum_of,
        accumulation=_accumulation(engine),
    )


def _accumulation(engine: Any) -> Accumulation | None:
    """What is in bf16 is added up in ``grad_accum_dtype``, and reduced in ``communication_data_type``, mostly bf16.

    Its schedule has ``ReduceTiedGrads`` before ``ReduceGrads``.
    """
    if not engine.bfloat16_enabled():
        return None
    _, dtype = engine.get_data_types()
    return Accumulation(dtype, engine.communication_data_type, tied_first=True)


@contextmanager
def observed(engine: Any, microbatches: Sequence[Any], reference: nn.Module) -> Iterator[Observation]:
    """Observe the batch that is trained inside this, from the weights of ``reference``.

    engine: as ``deepspeed.initialize`` gives it, of a PipelineModule. microbatches: as the step is given them; the
    engine's gradient accumulation steps are their number. What this gives has a ``data_iterator`` to hand to
    ``train_batch``. Raises ``DeepSpeedError`` for what is not covered.
    """
    step = step_of(engine)
    check_count(engine, DEEPSPEED.listed(microbatches))
    DEEPSPEED.check_neighbours(engine.stage_id, engine.grid.data_parallel_size, "DeepSpeed's own topology")
    DEEPSPEED.check_types(engine.module, reference, "the engine's layers are in")
    DEEPSPEED.load(engine.module.named_parameters(), reference)
    if hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()
    seen = Observation(step, iter(microbatches))
    with observing(seen, step):
        yield seen


def check_covered(engine: Any) -> None:
    """Raise ``DeepSpeedError`` for what would be judged wrongly."""
    known = DEEPSPEED.module("runtime.pipe.engine").PipelineEngine
    if type(engine) is not known:
        raise DeepSpeedError(f"the engine is a {type(engine).__name__}: {DEEPSPEED.adapter} covers PipelineEngine only")
    values = {name: getattr(engine, name) for name in _COVERED}
    DEEPSPEED.covers({name: value() if callable(value) else value for name, value in values.items()}, _COVERED)
    if engine.batch_fn is not None:
        raise DeepSpeedError("the engine has a batch_fn: give microbatches as it makes them, and leave it out")


def check_count(engine: Any, microbatches: Sequence[Any]) -> None:
    """Raise ``DeepSpeedError`` unless the engine takes a step of so many."""
    DEEPSPEED.check_count("gradient_accumulation_steps", engine.micro_batches, len(microbatches))


def check_loss(loss_fn: Any) -> None:
    """Raise ``DeepSpeedError`` where it is neither None nor a function."""
    if loss_fn is not None:
        DEEPSPEED.check_function(
            "loss_fn", loss_fn, "the PipelineModule's, a function of what the last layer gives and the labels"
        )


def validate(
    step: Callable[[Any, list[Any]], Any],
    *,
    reference: Callable[[], Any],
    microbatches: Sequence[Any],
    ranks: int | Mapping[str, int],
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    whitebox: WhiteBox | None = None,
) -> Verdict:
    """The verdict on ``step(reference, microbatches)``, which trains a PipelineEngine inside ``observed``.

    reference: gives the layers, seeded, as PipelineModule takes them. microbatches: pairs of inputs and labels, as the
    data iterator gives them. ranks: how many, all of one pipeline; or ``{"pp": 2, "dp": 2}``. loss_fn: the
    PipelineModule's; None: the last layer gives the loss. dtype: what the engine's config has the layers cast to.
    whitebox: whose ranks to use, as pytest's fixture; None: own ones.

    Raises ``DeepSpeedError``, and what ``whitebox.validate`` raises.
    """
    DEEPSPEED.module()
    DEEPSPEED.check_dtype(dtype)
    check_loss(loss_fn)
    data = [tuple(one) if isinstance(one, list) else one for one in DEEPSPEED.listed(microbatches)]
    loss, train = loss_fn or loss_of_layers, step
    if any(isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], tuple | list) for one in data):
        pairs = [pair_of(number, one) for number, one in enumerate(data)]
        labels: dict[tuple[int, ...], Any] = {(number,): one for number, (_, one) in enumerate(pairs)}
        loss, train = OfMicrobatch(loss, labels), partial(_with_labels, step, labels)
        data = [(inputs, torch.tensor([number])) for number, (inputs, _) in enumerate(pairs)]
    return DEEPSPEED.judge(whitebox)(
        Named(step, partial(_left_as_it_was, train)),
        reference=Named(reference, partial(WholeDeepSpeed, reference, dtype)),
        microbatches=data,
        ranks=DEEPSPEED.mesh(ranks),
        loss_fn=loss,
    )


def pair_of(number: int, microbatch: Any) -> tuple[Any, Any]:
    """A microbatch as a pair of inputs and labels. Raises ``DeepSpeedError`` where it is none."""
    if not isinstance(microbatch, tuple | list) or len(microbatch) != 2:
        found = type(microbatch).__name__
        found += f" of length {len(microbatch)}" if isinstance(microbatch, tuple | list) else ""
        raise DeepSpeedError(f"microbatch {number} is a {found}: expected a pair of inputs and labels")
    return microbatch[0], microbatch[1]


def _with_labels(
    step: Callable[[Any, list[Any]], Any],
    labels: Mapping[tuple[int, ...], Any],
    model: nn.Module,
    microbatches: list[Any],
) -> Any:
    """Run a step with the ``labels`` of several tensors for which numbers stand."""
    return step(model, [(inputs, labels[tuple(number.tolist())]) for inputs, number in microbatches])


def _left_as_it_was(step: Callable[[Any, list[Any]], Any], model: nn.Module, microbatches: list[Any]) -> Any:
    """Run a step as DeepSpeed's launcher would, and leave DeepSpeed as it was: the next layout can be another."""
    with _launched(next(model.parameters()).device.type), _state_kept():
        return step(model, microbatches)


def _launched(device: str) -> AbstractContextManager[None]:
    """While this is open, the environment has what a launcher of DeepSpeed's would have set."""
    on_cpu = {"DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
    return launched(LOCAL_SIZE=str(dist.get_world_size()), **on_cpu)


@contextmanager
def _state_kept() -> Iterator[None]:
    """While this is open, DeepSpeed's groups and backend are whatever the step makes."""
    names = ("comm.comm", "utils.groups", "runtime.pipe.p2p")
    kept = {name: dict(vars(DEEPSPEED.module(name))) for name in names}
    # Ranks are used for several layouts. Its shared memory is made for the first one's, and serves inference alone.
    try:
        with mock.patch.dict(DEEPSPEED.module("ops").__compatible_ops__, deepspeed_shm_comm=False):
            yield
    finally:
        for name, values in kept.items():
            vars(DEEPSPEED.module(name)).update(values)
