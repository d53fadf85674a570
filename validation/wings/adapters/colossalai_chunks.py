"""Stages of a ColossalAI rank: with virtual stages, one module has all, called once for each in turn."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from pipeproof.wings.adapters.framework import AdapterError, around


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
