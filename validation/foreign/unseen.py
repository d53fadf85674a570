"""What a foreign step does not show: the laws that do not apply to it, and those of whose matter nothing was seen."""

from collections.abc import Collection, Sequence

from pipeproof.core.reason import Reason
from pipeproof.foreign.assemble import Assembled
from pipeproof.observers.observed import Observed
from pipeproof.pipeline.sizes import first_few

_UNROUTED = "no router of the step was seen to choose"
_BUFFERS = "no stage that has any was seen to run all microbatches in their order"


def skipped(observed: Observed) -> Sequence[tuple[str, str]]:
    """The laws that do not apply to what was handed back."""
    claimed = _claimed(observed)
    laws = (("shards", "no parameter is in shards"), ("replicas", "no stage is held by several ranks"))
    return [(law, reason) for law, reason in laws if law not in claimed]


def missed(found: Assembled, observed: Observed, unlike: str, unrouted: str) -> Sequence[tuple[str, str]]:
    """The laws of whose matter nothing was handed back or watched.

    ``unlike``: why updates are not compared, ``unrouted``: why experts are not, if that is known.
    """
    modules = any(local.content is not None for stage in found.stages for local in stage.part.locals)
    every, claimed = [one for row in observed.ranks for one in row], _claimed(observed)
    norm, buffers = any(one.norm is not None for one in every), any(one.buffers for one in every)
    ordered = len(found.unseen) < len(found.stages) or not found.stages
    named = "gradients were handed back, not watched modules" if found.nameless else ""
    unwatched = found.missed or named or "no stage was watched: call watch(module)"
    if axis := found.replicas.sequence:
        unwatched = f"ranks along {axis} have parts of every sequence, so what passes is not compared"
    unseen = "gradients were handed back, not modules" if found.nameless else "no weight was seen before the step"
    return [
        (law, reason)
        for law, seen, reason in (
            ("initial-weights", modules or not found.stages, unseen),
            ("microbatches", ordered, unwatched),
            ("boundaries", found.watched, unwatched),
            ("grad-norm", norm, "no rank reports a norm"),
            ("outputs", any(one.outputs for one in every), "no rank hands any back"),
            ("routing", any(one.routes for one in every), unrouted or _UNROUTED),
            ("updated-parameters", not unlike or "updated-parameters" in claimed, Reason.OPTIMIZER.doubt(unlike)),
            ("buffers", buffers, f"{_BUFFERS}; {unwatched}" if not found.watched else _BUFFERS),
        )
        if not seen
    ]


def _claimed(observed: Observed) -> set[str]:
    return {claim.law for row in observed.ranks for one in row for claim in one.claims}


def unreported(observed: Observed, outputs: Collection[str]) -> dict[str, str]:
    """What the step does not report, by the law that needs it; ``outputs``: the names of those that it could."""
    told = any(one.losses or one.loss is not None for row in observed.ranks for one in row)
    why = Reason.UNREPORTED.doubt("no rank reports a loss: hand losses back beside the modules")
    found: dict[str, str] = {} if told else {"loss": why}
    named = {name for row in observed.ranks for one in row for name in one.outputs}
    if named and (left := [name for name in outputs if name not in named]):
        found["outputs"] = f"no rank hands back {first_few(left)}"
    return found
