"""What forwards leave behind in the buffers of stages, under the reference's names."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from pipeproof.foreign.matching import as_mates
from pipeproof.foreign.stages_in_order import Stage
from pipeproof.pipeline.action import Action, Kind
from pipeproof.reference.step import Site


def named_buffers(stages: Sequence[Stage], model: nn.Module, done: Iterable[Action]) -> Iterator[tuple[Site, Tensor]]:
    """The buffers of ``stages`` that ``model`` has, too, where nothing but a fault makes others of them.

    ``done``: what the rank of these stages did. One that took microbatches in another order, or of which nobody knows
    the order, may have other averages in them. One of another shape is another.
    """
    order: dict[int, list[int]] = {}
    for stage, kind, microbatch in done:
        if kind is Kind.FORWARD:
            order.setdefault(stage, []).append(microbatch)
    known = dict(model.named_buffers(remove_duplicate=False))
    for one in stages:
        forwards = order.get(one.index, [])
        told = {one.part.locals[k].name: name for k, name in one.names.items()}
        for local, buffer in one.part.buffers if forwards and forwards == sorted(forwards) else ():
            name = local.said or local.identical or as_mates(local.name, told)
            if name in known and known[name].shape == buffer.shape:
                yield (one.index, name), buffer
