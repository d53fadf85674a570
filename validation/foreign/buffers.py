"""What forwards leave behind in the buffers of stages, under the reference's names."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor, nn

from pipeproof.foreign.matching import as_mates
from pipeproof.foreign.stages_in_order import PlacedStage
from pipeproof.pipeline.action import Action, Kind
from pipeproof.reference.step import Site


def named_buffers(stages: Sequence[PlacedStage], model: nn.Module) -> Iterator[tuple[Site, Tensor]]:
    """The buffers of ``stages`` that ``model`` has, too. One of another shape is another."""
    known = dict(model.named_buffers(remove_duplicate=False))
    for one in stages:
        told = {one.part.locals[k].name: name for k, name in one.names.items()}
        for local, buffer in one.part.buffers:
            name = local.said or local.identical or as_mates(local.name, told)
            if name in known and known[name].shape == buffer.shape:
                yield (one.index, name), buffer


def in_turn(done: Iterable[Action]) -> Collection[int]:
    """The stages that took the microbatches in their order: of others, averages may be others, and right."""
    order: dict[int, list[int]] = {}
    for stage, kind, microbatch in done:
        if kind is Kind.FORWARD:
            order.setdefault(stage, []).append(microbatch)
    return [stage for stage, forwards in order.items() if forwards == sorted(forwards)]
