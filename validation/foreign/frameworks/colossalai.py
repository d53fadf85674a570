"""ColossalAI's pipelines under ``whitebox.validate``: where their losses, gradients, norm and names are.

A user's step boosts its model as ever and calls ``booster.execute_pipeline`` and ``optimizer.step`` inside
``observed``. ``validate`` takes the reference from the same model and criterion. Nothing of ColossalAI is imported
before one of these is called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.foreign.frameworks.colossalai_chunks import stages_of, told_apart
from pipeproof.foreign.frameworks.colossalai_whole import (
    CHILD,
    COLOSSALAI,
    ColossalAIError,
    Criterion,
    Packed,
    WholeColossalAI,
    check_model,
)
from pipeproof.foreign.frameworks.drawn import Drawn
from pipeproof.foreign.frameworks.framework import Named, OfMicrobatch, around, replaced
from pipeproof.foreign.frameworks.framework_step import FrameworkStep, Observation, Sight, observing, telling
from pipeproof.foreign.handed_back import FlatShard, Gradient
from pipeproof.foreign.validator import WhiteBox
from pipeproof.reference.accumulation import Accumulation
from pipeproof.worlds.belongings import belongs_to_rank

_COVERED = {
    "tp_size": 1,
    "sp_size": 1,
    "enable_sequence_parallelism": False,
    "cpu_offload": False,
    "use_fp8": False,
}
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}  # what the plugin casts a model to


def step_of(booster: Any, model: Any, optimizer: Any, batches: int | None = 1) -> FrameworkStep:
    """The step of a boosted model on this rank, which takes so many batches; None: nobody says.

    Raises ``ColossalAIError`` for what is not covered.
    """
    plugin = check_covered(booster, model, optimizer)
    stages = stages_of(plugin.stage_manager, model.module)
    losses, runs, drawn = list[Tensor](), list[str](), Drawn()

    def gradients() -> dict[nn.Parameter, Gradient]:
        if batches not in (None, len(runs)):
            raise ColossalAIError(
                f"execute_pipeline was called {len(runs)} times before optimizer.step, and the check was given "
                f"{batches} batch{'es' * (batches != 1)}: let both be the same"
            )
        return gradients_of(model, optimizer)

    return FrameworkStep(
        stages,
        lambda stage, name: f"{CHILD}.{name}",
        gradients,
        lambda: losses,
        partial(_watching, plugin, model.module, stages, optimizer, (losses, runs, drawn)),
        unfinished=ColossalAIError("optimizer.step was not called in the block: let the block call it"),
        drawn=drawn,
        accumulation=_accumulation(plugin, optimizer),
    )


def _accumulation(plugin: Any, optimizer: Any) -> Accumulation | None:
    """What is in bf16 is added up in it. Copies of a shared weight are reduced, and then replicas, with ZeRO in another
    type where it is told one.
    """
    if type_of(plugin) is None:
        return None
    return Accumulation(between=getattr(optimizer, "_communication_dtype", None), tied_first=True)


def gradients_of(model: Any, optimizer: Any) -> dict[nn.Parameter, Gradient]:
    """The gradients that ``optimizer`` is about to take, where they are."""
    found = [one for one in model.module.parameters() if one.requires_grad]
    return {one: _sharded(one, optimizer) if is_zero(optimizer) else one.grad for one in found}


def is_zero(optimizer: Any) -> bool:
    """Whether it keeps gradients in parts of its own, one for each replica."""
    return hasattr(optimizer, "pid_to_grad_store")


def _sharded(parameter: nn.Parameter, optimizer: Any) -> Gradient:
    """What this rank has of a gradient with ZeRO: equal parts of the flattened whole, of which the last are padded."""
    store = optimizer.pid_to_grad_store[id(parameter)]
    group = next(k for k, every in optimizer._working_param_groups.items() if any(one is parameter for one in every))
    parts = store.get_partitioned_gradients_by_param_id(group, id(parameter))
    if not parts:
        return None
    part: Tensor = parts[store.local_rank].detach()
    if store.world_size == 1:
        return part.flatten()[: parameter.numel()].view_as(parameter)
    start = part.numel() * store.local_rank
    rest = parameter.numel() - start
    return FlatShard(part.flatten()[:rest], start) if rest > 0 else FlatShard(None)


@contextmanager
def _watching(
    plugin: Any,
    module: nn.Module,
    stages: Mapping[int, nn.Module],
    optimizer: Any,
    notes: tuple[list[Tensor], list[str], Drawn],
    sight: Sight,
) -> Iterator[None]:
    """While this is open, note losses and data, tell ``sight`` that the optimizer is about to step, and the norm."""
    losses, runs, drawn = notes

    def noted(run: Any, model: Any, data_iter: Any, criterion: Criterion, *more: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            runs.append("run")
            data_iter, criterion = drawn.noting(data_iter), _noting(criterion, losses)
        return run(model, data_iter, criterion, *more, **named)

    with ExitStack() as stack:
        stack.enter_context(around(plugin.scheduler, "forward_backward_step", noted))
        stack.enter_context(around(optimizer, "step", telling(sight, lambda _: optimizer.get_grad_norm())))
        stack.enter_context(told_apart(plugin.stage_manager, module, stages))
        yield


def _noting(criterion: Criterion, losses: list[Tensor]) -> Criterion:
    """``criterion``, noting every loss before the schedule divides it."""

    @wraps(criterion)
    def noted(outputs: Any, microbatch: Any) -> Tensor:
        loss = criterion(outputs, microbatch)
        losses.append(loss.detach().clone())
        return loss

    return noted


@contextmanager
def observed(
    booster: Any, model: Any, optimizer: Any, microbatches: Sequence[Any], reference: nn.Module
) -> Iterator[Observation]:
    """Observe the batch that is trained inside this, from the weights of ``reference``.

    booster, model, optimizer: as ``execute_pipeline`` is called with them. microbatches: as the step is given them.
    What this gives has a ``data_iterator`` of the batch that they are cut from, to hand to ``execute_pipeline``. Raises
    ``ColossalAIError`` for what is not covered.
    """
    step = step_of(booster, model, optimizer)
    packed = _packed(reference)
    tensors = [packed.pack(one) for one in microbatches]
    check_count(booster.plugin.scheduler, len(microbatches), packed.rows)
    _check_order(booster.plugin)
    COLOSSALAI.check_types(model.module, reference, "the model is boosted to")
    COLOSSALAI.load(step.parameters(), reference)
    optimizer.update_master_params(model)
    seen = Observation(step, iter([packed.joined(tensors)]))
    with observing(seen, step):
        yield seen


def _packed(reference: Any) -> Packed:
    if not isinstance(reference, WholeColossalAI):
        raise ColossalAIError(
            f"the reference is a {type(reference).__name__}: expected the model that validate gave to the step"
        )
    return reference.packed


def check_covered(booster: Any, model: Any, optimizer: Any) -> Any:
    """The plugin; raises ``ColossalAIError`` for what would be judged wrongly."""
    place = COLOSSALAI.module("booster.plugin.hybrid_parallel_plugin")
    plugin: Any = getattr(booster, "plugin", None)
    for what, one, kinds in (
        ("the booster's plugin", plugin, [place.HybridParallelPlugin]),
        ("the model", model, [place.HybridParallelModule]),
        (
            "the optimizer",
            optimizer,
            [place.HybridParallelNaiveOptimizer, place.HybridParallelAMPOptimizer, place.HybridParallelZeroOptimizer],
        ),
    ):
        if type(one) not in kinds:
            raise ColossalAIError(
                f"{what} is a {type(one).__name__}: {COLOSSALAI.adapter} covers what HybridParallelPlugin boosts"
            )
    if plugin.scheduler is None:
        raise ColossalAIError("pp_size is 1: there is no pipeline; give the plugin a pp_size above 1 for the check")
    COLOSSALAI.covers(vars(plugin), _COVERED)
    if plugin.precision not in _PRECISIONS:
        raise ColossalAIError(
            f"precision is {plugin.precision}: {COLOSSALAI.adapter} covers fp32 and bf16; set it so for the check"
        )
    COLOSSALAI.covers({"fp8_communication": plugin.shard_config.fp8_communication}, {"fp8_communication": False})
    check_model(model.module)
    return plugin


def check_count(scheduler: Any, count: int, rows: int) -> None:
    """Raise ``ColossalAIError`` unless ``scheduler`` cuts a batch into so many microbatches of so many rows."""
    for name, seen, due in (("microbatches", count_of(scheduler), count), ("rows", scheduler.microbatch_size, rows)):
        option = "num_microbatches" if name == "microbatches" else "microbatch_size"
        COLOSSALAI.check_count(f"the plugin's {option}", seen, due, name)


def count_of(scheduler: Any) -> int | None:
    """How many microbatches it was told to cut a batch into, if it was; its classes have two names for it."""
    count: int | None = getattr(scheduler, "num_microbatches", getattr(scheduler, "num_microbatch", None))
    return count


def _check_order(plugin: Any) -> None:
    """Raise ``ColossalAIError`` where ranks are numbered otherwise than ``whitebox.validate`` numbers them."""
    if plugin.dp_axis > plugin.pp_axis and plugin.dp_size > 1:
        raise ColossalAIError(
            f"dp_outside is False: {COLOSSALAI.adapter}.validate covers True only, the default; set it so for the check"
        )


def type_of(plugin: Any) -> torch.dtype | None:
    """What the plugin casts a model to; None where it leaves it."""
    return _PRECISIONS[plugin.precision]


def check_criterion(criterion: Any) -> None:
    """Raise ``ColossalAIError`` where it is no function."""
    COLOSSALAI.check_function(
        "criterion", criterion, "a function of what the model gives and the microbatch, as execute_pipeline is given"
    )


def validate(
    step: Callable[[Any, list[Any]], Any],
    *,
    reference: Callable[[], nn.Module],
    criterion: Criterion,
    microbatches: Sequence[Any],
    ranks: int | Mapping[str, int],
    dtype: torch.dtype | None = None,
    whitebox: WhiteBox | None = None,
) -> Verdict:
    """The verdict on ``step(reference, microbatches)``, which trains a boosted model inside ``observed``.

    reference: builds the whole model, seeded, as it is before it is boosted. criterion: as ``execute_pipeline`` is
    given it. microbatches: as the pipeline cuts them from a batch: dicts, tuples or tensors, of as many rows each, for
    all replicas. ranks: how many, all of one pipeline; or ``{"dp": 2, "pp": 2}``. dtype: what the plugin casts the
    model to. whitebox: whose ranks to use, as pytest's fixture; None: own ones.

    Raises ``ColossalAIError``, and what ``whitebox.validate`` raises.
    """
    COLOSSALAI.module()
    COLOSSALAI.check_dtype(dtype)
    check_criterion(criterion)
    packed = Packed.of(COLOSSALAI.listed(microbatches))
    return COLOSSALAI.judge(whitebox)(
        Named(step, partial(_left_as_it_was, step)),
        reference=Named(reference, partial(WholeColossalAI, reference, packed, dtype)),
        microbatches=[(packed.pack(one), torch.tensor([number])) for number, one in enumerate(microbatches)],
        ranks=COLOSSALAI.mesh(ranks),
        loss_fn=OfMicrobatch(criterion, {(number,): one for number, one in enumerate(microbatches)}),
    )


def _left_as_it_was(step: Callable[[Any, list[Any]], Any], whole: WholeColossalAI, microbatches: Sequence[Any]) -> Any:
    """Run a step, and leave ColossalAI as it was, so that the next layout can be another."""
    with _on(next(whole.parameters()).device.type), _state_kept():
        return step(whole, [whole.packed.unpack(tensors) for tensors, _ in microbatches])


@contextmanager
def _on(device: str) -> Iterator[None]:
    """While this is open, ColossalAI works on ``device``: it takes the first GPU that there is."""
    place: Any = COLOSSALAI.module("accelerator.api")
    kept = place._ACCELERATOR
    if kept is None or kept.name != device:
        place.set_accelerator(device)
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(_handles_kept())
            # It asks torch for what only some vendors' torch has.
            messages = COLOSSALAI.module("pipeline.p2p")
            stack.enter_context(replaced(messages, "_check_for_nccl_hccl_backend", lambda _: False))
        try:
            yield
        finally:
            place._ACCELERATOR = kept


_handles: list[Any] = []  # of the messages of the step that is run, or was last
belongs_to_rank(__name__, "_handles", fresh=lambda _: [])


@contextmanager
def _handles_kept() -> Iterator[None]:
    """While this is open, handles of messages live on: gloo forgets a send whose handle ColossalAI drops.

    They do until the next step, for a rank may be done when its last message is not there yet.
    """
    _handles.clear()

    def keeping(send_and_receive: Any, *given: Any, **named: Any) -> Any:
        made = send_and_receive(*given, **named)
        _handles.append(made[1])
        return made

    with around(COLOSSALAI.module("pipeline.p2p"), "_batch_send_recv_tensor", keeping):
        yield


def _state_kept() -> AbstractContextManager[Any]:
    """While this is open, ColossalAI's only coordinator of ranks is whatever the step makes."""
    return mock.patch.dict(COLOSSALAI.module("context.singleton_meta").SingletonMeta._instances, clear=True)
