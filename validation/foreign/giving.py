"""What outputs would bring gradients, if a stage's inputs had not lost on their way that gradients flow to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from pipeproof.foreign.chain import Chain
from pipeproof.foreign.own_calls import StageSeen
from pipeproof.observers.calls import Call
from pipeproof.observers.watching import tensors_in
from pipeproof.reference.again import Again
from pipeproof.reference.copied import twin

Giving = Mapping[int, frozenset[int]]  # by the number of a call, its outputs that bring a gradient


def all_giving(
    chain: Chain,
    modules: Mapping[int, nn.Module],
    calls: Mapping[int, Sequence[Call]],
    *,
    gather: Callable[[object, str], list[Any]],
    of_replica: Callable[[Sequence[Any]], list[Any]],
) -> Chain:
    """``chain``, in which what lost on its way that gradients flow to it counts, through as many stages as there are.

    ``modules`` and ``calls`` are this rank's. ``gather`` brings all ranks'; ``of_replica`` picks its replica's.
    """
    while True:
        own: dict[int, Giving] = {}
        for stage, module in modules.items():
            pairs = zip(calls[stage], chain.stages[stage].calls, strict=True)
            own[stage] = _giving_more(module, [replace(a, giving=b.giving) for a, b in pairs], chain.lost(stage))
        every = gather(own, "whether gradients should flow to more of what was sent")
        if not any(more for part in every for more in part.values()):
            return chain
        given = {stage: more for part in of_replica(every) for stage, more in part.items()}
        chain = Chain(_with_giving(chain.stages, given), chain.data)


def _giving_more(module: nn.Module, calls: Sequence[Call], lost: Sequence[frozenset[int]]) -> Giving:
    """The calls of a stage that bring gradients by more outputs when they run again and what is ``lost`` counts."""
    found: dict[int, frozenset[int]] = {}
    model = Again(twin(module)) if any(lost) else None
    for k, (call, inputs) in enumerate(zip(calls, lost, strict=True)):
        if model is None or not inputs or call.again is None:
            continue
        tensors = [one.detach().requires_grad_(n in inputs | call.needing) for n, one in enumerate(call.again.tensors)]
        try:
            made = tensors_in(model(call.again, *tensors))
        except Exception:  # no one type: it is the user's code, and its link is going to say why
            continue
        giving = call.giving | {n for n, one in enumerate(made) if one.requires_grad}
        if giving > call.giving:
            found[k] = giving
    return found


def _with_giving(stages: Mapping[int, StageSeen], given: Mapping[int, Giving]) -> dict[int, StageSeen]:
    """``stages``, whose calls bring gradients by what is ``given``."""
    return {
        stage: replace(
            seen,
            calls=tuple(
                replace(call, giving=given.get(stage, {}).get(k, call.giving)) for k, call in enumerate(seen.calls)
            ),
        )
        for stage, seen in stages.items()
    }
