"""What a foreign step does not show: the laws that do not apply to it, and those of whose matter nothing was seen."""

from collections.abc import Sequence

from pipeproof.foreign.assemble import Assembled
from pipeproof.observers.observed import Observed


def skipped(found: Assembled, observed: Observed) -> Sequence[tuple[str, str]]:
    """The laws that do not apply to what was handed back."""
    claimed = {claim.law for row in observed.ranks for claim in row[0].claims}
    laws = (("shards", "no parameter is in shards"), ("replicas", "no stage is held by several ranks"))
    return [(law, reason) for law, reason in laws if law not in claimed]


def missed(found: Assembled, observed: Observed) -> Sequence[tuple[str, str]]:
    """The laws of whose matter nothing was handed back or watched."""
    modules = any(local.content is not None for stage in found.stages for local in stage.part.locals)
    norm = any(row[0].norm is not None for row in observed.ranks)
    ordered = len(found.unseen) < len(found.stages) or not found.stages
    named = "gradients were handed back, not watched modules" if found.nameless else ""
    unwatched = found.missed or named or "no stage was watched: watch(module) does"
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
            ("updated-parameters", not found.unlike, found.unlike),
        )
        if not seen
    ]


def unreported(observed: Observed) -> dict[str, str]:
    """What the step does not report, by the law that needs it."""
    told = any(row[0].losses or row[0].loss is not None for row in observed.ranks)
    return {} if told else {"loss": "no rank reports a loss: hand losses back beside the modules"}
