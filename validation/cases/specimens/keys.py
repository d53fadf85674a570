"""Keys of the store that are read before they are what they should be."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from pipeproof.cases.specimens.by_hand import across, beside, scale_gradients
from pipeproof.cases.specimens.planting import first, second
from pipeproof.cases.specimens.specimen import Fault, Plant, Planted, Specimen
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transports import Transport


def _by_key(factor: Callable[[Any, int, int], float]) -> Plant:
    """Gradients are multiplied by what the store has: of a rank in a step, 1 where that is right."""

    def plant(parts: Parts) -> Parts:
        steps = iter(range(1, 100))

        def multiplied(parts: Parts) -> None:
            group = dist.group.WORLD
            assert group is not None, "there is a default group"
            scale_gradients(parts, factor(group.get_group_store(), parts.transport.rank, next(steps)))

        return beside(multiplied)(parts)

    return plant


def _asked_once(store: Any, rank: int, step: int) -> float:
    """A key is asked for once, and a default taken where it is not there."""
    if rank == 0:
        store.set("loss scale", "1")
        return 1.0
    return float(store.get("loss scale")) if store.check(["loss scale"]) else 2.0


def _waited_for(store: Any, rank: int, step: int) -> float:
    if rank == 0:
        store.set("loss scale", "1")
        return 1.0
    return float(store.get("loss scale"))


def _counted_early(store: Any, rank: int, step: int) -> float:
    """Ranks count themselves in the store; the first one takes the count before all have."""
    store.add("ranks", 1)
    return store.add("ranks", 0) / 2 if rank == 0 else 1.0


def _counted_behind_a_barrier(store: Any, rank: int, step: int) -> float:
    store.add("ranks", 1)
    dist.barrier()
    return store.add("ranks", 0) / 2 if rank == 0 else 1.0


def _of_any_step(store: Any, rank: int, step: int) -> float:
    """A key has one name in all steps, so that who is early finds what was there before."""
    if rank == 0:
        store.set("step", str(step))
        return 1.0
    return float(store.get("step")) / step


def _of_this_step(store: Any, rank: int, step: int) -> float:
    if rank == 0:
        store.set(f"step {step}", str(step))
        return 1.0
    return float(store.get(f"step {step}")) / step


_ONE = across(Transport.UNLIMITED, microbatches=1)
_TWO_STEPS = across(Transport.UNLIMITED, microbatches=1, plan=("train", "train"))
_SECOND_SCALED = Fault("scale", "gradient", stage=second)
_planted = partial(Specimen, classes=("tI", "mI"), needs=_ONE)
_control = partial(Planted, origin="the same code without the fault", needs=_ONE)

SPECIMENS: Mapping[str, Specimen] = {
    "key-asked-for-once": _planted(
        summary="a key of the store is asked for once, and a default is taken where another rank has not set it yet",
        origin="no report: the class of barriers that are missing",
        fault=_SECOND_SCALED,
        plant=_by_key(_asked_once),
    ),
    "counter-read-early": _planted(
        summary="ranks count themselves in the store, and one takes the count before all have",
        origin="no report: the class of barriers that are missing",
        fault=Fault("scale", "gradient", stage=first, factor=lambda case: 0.5),
        plant=_by_key(_counted_early),
    ),
    "key-of-the-step-before": _planted(
        summary="a key of the store has one name in all steps, and a rank that is early finds the last one's",
        origin="no report: the class of state that outlives a step",
        classes=("tI", "mL"),
        fault=_SECOND_SCALED,
        needs=_TWO_STEPS,
        plant=_by_key(_of_any_step),
    ),
}
CONTROLS: Mapping[str, Planted] = {
    "key-waited-for": _control(summary="a key of the store is waited for", plant=_by_key(_waited_for)),
    "counter-read-behind-a-barrier": _control(
        summary="a count is taken once all have counted", plant=_by_key(_counted_behind_a_barrier)
    ),
    "key-of-this-step": _control(
        summary="a key of the store has the step in its name", needs=_TWO_STEPS, plant=_by_key(_of_this_step)
    ),
}
