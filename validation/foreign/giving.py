"""What outputs bring gradients that lead to a weight, whichever of a step's messages were asked for theirs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from pipeproof.foreign.chain import Chain
from pipeproof.foreign.own_calls import StageSeen
from pipeproof.observers.calls import Call
from pipeproof.observers.tensors_in import tensors_in
from pipeproof.reference.again import Again

Giving = Mapping[int, frozenset[int]]  # by the number of a call, its outputs that bring a gradient


def all_giving(
    chain: Chain,
    modules: Mapping[int, nn.Module],
    calls: Mapping[int, Sequence[Call]],
    *,
    gather: Callable[[object, str], list[Any]],
    of_replica: Callable[[Sequence[Any]], list[Any]],
) -> Chain:
    """``chain``, in which outputs bring gradients as if every message had been asked for one that should be, and no
    other: so a gradient that is lost, or asked for in vain, is followed through as many stages as there are.

    ``modules`` and ``calls`` are this rank's. ``gather`` brings all ranks'; ``of_replica`` picks its replica's.
    """
    for _ in range(1 + len(chain.stages)):  # what a stage's outputs bring depends on stages before it alone
        own = {stage: _otherwise(chain, stage, module, calls[stage]) for stage, module in modules.items()}
        every = gather(own, "to which messages gradients should flow")
        if not any(other for part in every for other in part.values()):
            break
        given = {stage: other for part in of_replica(every) for stage, other in part.items()}
        chain = Chain(_with_giving(chain.stages, given), chain.data)
    return chain


def _otherwise(chain: Chain, stage: int, module: nn.Module, calls: Sequence[Call]) -> Giving:
    """The calls of a stage that bring gradients by other outputs when what is due to its inputs is all they want."""
    found: dict[int, frozenset[int]] = {}
    seen, due = chain.stages[stage].calls, chain.due(stage)
    other = [k for k, (call, inputs) in enumerate(zip(seen, due, strict=True)) if inputs != call.needing]
    model = Again(module) if other else None
    for k in other:
        again = calls[k].again
        if model is None or again is None:
            continue
        tensors = [one.detach().requires_grad_(n in due[k]) for n, one in enumerate(again.tensors)]
        try:
            made = tensors_in(model(again, *tensors))
        except Exception:  # no one type: it is the user's code, and its link is going to say why
            continue
        giving = frozenset(n for n, one in enumerate(made) if one.requires_grad) - set(seen[k].repeated)
        if giving != seen[k].giving:
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
