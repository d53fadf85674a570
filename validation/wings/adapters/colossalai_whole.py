"""The whole model for a ColossalAI pipeline step, with its criterion, an environment for the run, and its stages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeproof.core.observe.per_rank_globals import belongs_to_rank
from pipeproof.whitebox.task import LossOfAll
from pipeproof.wings.adapters import on_cpu
from pipeproof.wings.adapters.framework import AdapterError, Framework, around
from pipeproof.wings.adapters.whole import Called, OfMicrobatch, Packed, Whole

COLOSSALAI = Framework(
    "colossalai",
    "colossalai",
    ("0.5",),
    "pip install --no-deps colossalai==0.5.0 galore-torch==1.0 bitsandbytes==0.50.2 && "
    "pip install peft==0.21.2 einops psutil",
    child="model",
    axes=("dp", "pp"),
    shim=on_cpu.colossalai,
)

Criterion = Callable[[Any, Any], Tensor]  # of what the model gives, and the microbatch


def whole_of(
    reference: Callable[..., Any],
    criterion: Any,
    microbatches: Sequence[Any],
    dtype: torch.dtype | None = None,
    *,
    replica: int = 0,
) -> Whole:
    """Return the whole model and criterion, for this replica's microbatches, cut from one batch."""
    expected = "a function of what the model gives and the microbatch, as execute_pipeline is given"
    COLOSSALAI.expect_function("criterion", criterion, expected)
    packed = Packed.of(microbatches)
    rows = [rows_in(f"microbatch {number}", one) for number, one in enumerate(microbatches)]
    if other := [number for number, count in enumerate(rows) if count != rows[0]]:
        raise AdapterError(
            f"microbatch {other[0]} has {rows[other[0]]} rows, microbatch 0 has {rows[0]}: expected the same number in "
            "all, as they are cut from one batch"
        )

    def of_all(every: Sequence[tuple[Any, Any]]) -> OfMicrobatch:
        return OfMicrobatch(criterion, {tuple(number.tolist()): packed.unpack(inputs) for inputs, number in every})

    pairs = [(packed.pack(one), torch.tensor([replica, number])) for number, one in enumerate(microbatches)]
    build = partial(_build, reference, packed, dtype)
    return Whole(reference, build, pairs, LossOfAll(of_all), given=lambda one: packed.unpack(one[0]), alone=as_launched)


def cut(batch: Any, count: int | None, size: int | None) -> list[Any]:
    """Cut ``batch`` into microbatches, by their number or their rows, like a pipeline.

    Raises ``AdapterError`` for unequal sizes.
    """
    rows = rows_in("the batch", batch)
    expected = size or (rows // count if count else 0)
    if not expected or rows % expected or count not in (None, rows // expected):
        wanted = f"{count} microbatches" if count else "microbatches"
        wanted += f" of {size} rows" if size else " of equal sizes"
        raise AdapterError(f"the batch has {rows} rows: expected what is cut into {wanted}")
    starts = range(0, rows, expected)
    return [tree_map_only(Tensor, lambda tensor, k=k: tensor[k : k + expected], batch) for k in starts]  # type: ignore[misc]


def rows_in(what: str, batch: Any) -> int:
    """Return the common number of rows in all tensors."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not tensors:
        raise AdapterError(f"{what} has no tensor in it: expected a dict, a tuple or a tensor")
    found = [tensor.shape[0] if tensor.dim() else None for tensor in tensors]
    if others := [one for one in found if one != found[0] or one is None]:
        has = "a tensor without dimensions" if others[0] is None else f"tensors of {found[0]} and of {others[0]} rows"
        raise AdapterError(
            f"{what} has {has}: ColossalAI cuts every tensor along dimension 0, so give all of them one row per sample"
        )
    rows: int = found[0]  # type: ignore[assignment]  # it has dimensions
    return rows


def _build(reference: Callable[[], nn.Module], packed: Packed, dtype: torch.dtype | None) -> Called:
    """Build the whole model, called like ColossalAI's schedules do; mixed precision casts inputs too."""
    model = COLOSSALAI.build(reference)
    COLOSSALAI.expect("the reference", model, nn.Module, "the model, before it is boosted")
    check_model(model)

    def call(model: nn.Module, microbatch: Any) -> Any:
        if dtype is not None:
            microbatch = tree_map_only(
                Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, microbatch
            )
        if isinstance(microbatch, list | tuple):
            return model(*microbatch)
        return model(**microbatch) if isinstance(microbatch, dict) else model(microbatch)

    return Called(model if dtype is None else model.to(dtype), packed, call)


def check_model(model: nn.Module) -> None:
    """Raise ``AdapterError`` for an unsupported model."""
    if hasattr(model, "peft_config"):
        raise AdapterError(f"the model has LoRA's layers: {COLOSSALAI.adapter} covers models without; train all of it")
    COLOSSALAI.check_dropout(model)


@contextmanager
def as_launched(device: str) -> Iterator[None]:
    """Run ColossalAI on ``device`` while open, although by default it takes the first GPU.

    Its only coordinator of ranks comes from a step; afterwards all state is restored.
    """
    place: Any = COLOSSALAI.module("accelerator.api")
    kept = place._ACCELERATOR
    if kept is None or kept.name != device:
        place.set_accelerator(device)
    with ExitStack() as stack:
        stack.callback(setattr, place, "_ACCELERATOR", kept)
        if device == "cpu":
            stack.enter_context(_handles_kept())
            # It asks torch for attributes of some vendors' builds.
            messages = COLOSSALAI.module("pipeline.p2p")
            stack.enter_context(mock.patch.object(messages, "_check_for_nccl_hccl_backend", return_value=False))
        coordinators = COLOSSALAI.module("context.singleton_meta").SingletonMeta._instances
        stack.enter_context(mock.patch.dict(coordinators, clear=True))
        yield


_handles: list[Any] = []  # message handles of the current or last step
belongs_to_rank(__name__, "_handles", fresh=lambda _: [])


@contextmanager
def _handles_kept() -> Iterator[None]:
    """Keep message handles alive while open: gloo forgets a send after ColossalAI drops its handle.

    They live until the next step, because a rank may end before its last message arrives.
    """
    _handles.clear()

    def keeping(send_and_receive: Any, *given: Any, **named: Any) -> Any:
        made = send_and_receive(*given, **named)
        _handles.append(made[1])
        return made

    with around(COLOSSALAI.module("pipeline.p2p"), "_batch_send_recv_tensor", keeping):
        yield


class Chunk(nn.Module):
    """A rank's part of one stage: parameters of ``whole`` with these names, called in its place."""

    def __init__(self, whole: nn.Module, names: frozenset[str], call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call
        self._like = [*_fill(self, whole, names, "")]

    def forward(self, *given: Any, **named: Any) -> Any:
        for made, original in self._like:
            made.training = original.training
        return self._call(*given, **named)


def _fill(made: nn.Module, of: nn.Module, names: frozenset[str], prefix: str) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Register named parameters of ``of`` in ``made``; yield pairs of modules, new and old."""
    yield made, of
    for leaf, parameter in of._parameters.items():
        if f"{prefix}{leaf}" in names:
            made.register_parameter(leaf, parameter)
    for name, child in of.named_children():
        inside = f"{prefix}{name}."
        own = {f"{inside}{one}" for one, _ in child.named_parameters(remove_duplicate=False)}
        if own and own <= names:
            made.add_module(name, child)
        elif own & names:
            part = nn.Module()
            made.add_module(name, part)
            yield from _fill(part, child, names, inside)


def stages_of(manager: Any, module: nn.Module) -> dict[int, nn.Module]:
    """Return this rank's modules by stage: ``module``, or a ``Chunk`` of it for each virtual stage.

    manager: ColossalAI's ``PipelineStageManager``. Raises ``AdapterError`` if the chunks' parameters are unclear.
    """
    if not manager.is_interleave:
        return {int(manager.stage): module}
    numbers = numbers_of(manager)
    held = _names_by_chunk(module, manager.stage_indices)
    calls = [partial(_at, _RankChunk(manager, chunk), module.forward) for chunk in range(len(numbers))]
    return {number: Chunk(module, held[chunk], calls[chunk]) for chunk, number in enumerate(numbers)}


@dataclass(frozen=True)
class _RankChunk:
    """A chunk of this rank; copies of a module share its manager."""

    manager: Any
    chunk: int

    def __deepcopy__(self, memo: object) -> "_RankChunk":
        return self


def _at(place: _RankChunk, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call with the manager at this chunk, because reruns happen outside a schedule."""
    with place.manager.switch_model_chunk_id(place.chunk):
        return call(*given, **named)


def numbers_of(manager: Any) -> list[int]:
    """Return this rank's stages by chunk: dealt to ranks in turn, or in a V."""
    rank, ranks = int(manager.stage), int(manager.num_stages)  # numpy integers do not go into JSON
    if manager.use_zbv:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * chunk for chunk in range(manager.num_model_chunks)]


def _names_by_chunk(module: nn.Module, ranges: Sequence[Sequence[int]]) -> list[frozenset[str]]:
    """Return the parameter names in each chunk, given its range of layers.

    Parameters before the layers belong to the first chunk, parameters behind them to the last.
    """
    chunk_of = {layer: chunk for chunk, (start, end) in enumerate(ranges) for layer in range(start, end)}
    lists = [*_lists_of(module, set(chunk_of))]
    if not lists:
        wanted = ", ".join(f"{start} to {end - 1}" for start, end in ranges)
        raise AdapterError(
            f"no list of the model has layers {wanted}, and no others, on this rank: virtual stages are known by "
            "the layers in one nn.ModuleList"
        )
    found: list[set[str]] = [set() for _ in ranges]
    chunk = 0
    for name, _ in module.named_parameters(remove_duplicate=False):
        layer = next((int(name.removeprefix(one).partition(".")[0]) for one in lists if name.startswith(one)), None)
        chunk = chunk_of[layer] if layer is not None else len(ranges) - 1 if chunk else 0
        found[chunk].add(name)
    return [frozenset(names) for names in found]


def _lists_of(module: nn.Module, layers: set[int], prefix: str = "") -> Iterator[str]:
    """Yield paths of lists in ``module`` that hold exactly these ``layers``."""
    for name, child in module.named_children():
        inside = f"{prefix}{name}."
        if isinstance(child, nn.ModuleList | nn.Sequential):
            held = {k for k, layer in enumerate(child) if any(True for _ in layer.parameters())}
            if held == layers:
                yield inside
                continue
        yield from _lists_of(child, layers, inside)


@contextmanager
def tell_chunks_apart(manager: Any, module: nn.Module, stages: Mapping[int, nn.Module]) -> Iterator[None]:
    """Redirect calls of ``module`` to the schedule's current chunk while open."""
    if not manager.is_interleave:
        yield
        return
    chunks = [stages[number] for number in numbers_of(manager)]
    with around(module, "forward", lambda _, *given, **named: chunks[manager.model_chunk_id](*given, **named)):
        yield
