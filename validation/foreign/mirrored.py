"""Which parts are one stage; and pipelines that run both ways, whose ranks hold each stage more than once."""

from collections import Counter
from collections.abc import Mapping, Sequence

from validation.foreign.rank import Part, RankMade


def likeness(part: Part) -> tuple[object, ...]:
    """Equal for parts that are one stage. Shards know their peers; the names of two stages can be the same."""
    peers = next((shard.peers for shard in part.shards.values()), ())
    return (peers, *(one.said or one.identical or one.content or one.name for one in part.locals))


def mirrored(made: Sequence[RankMade], known: Mapping[str, bytes]) -> bool:
    """Whether ranks hold all of the reference, each stage on two of them: that is no mistake, as in DualPipe.

    There are no fewer stages than ranks, or the model was not cut. ``known``: the contents of the reference's
    parameters by name.
    """
    parts = [part for one in made for part in one.parts]
    held = [local for part in parts for local in part.locals]
    stages = Counter(map(likeness, parts))
    whole = {local.content for local in held} >= set(known.values()) or {local.name for local in held} >= known.keys()
    return whole and set(stages.values()) == {2} and len(stages) >= len(made)
