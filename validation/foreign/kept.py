"""What an operation without an update must leave as it was: weights, and of an evaluation gradients, too."""

from collections.abc import Iterator

from pipeproof.core.tolerance import same_bits, stands_for_none
from pipeproof.foreign.shared_stages import began
from pipeproof.foreign.stages_in_order import PlacedStage
from pipeproof.observers.digest import digest
from pipeproof.observers.observed import Claim


def kept(stage: PlacedStage, operation: str) -> Iterator[Claim]:
    """What must hold of ``stage`` after ``operation``, of parameters that it was seen to use and has whole."""
    for rank, part in stage.part.members:
        for k, name in stage.names.items():
            where, after = part.after.get(k, (None, None))
            before = None if k in part.lacks or k in part.shards else began(part, k)
            if after is None or where is not None or before is None:
                continue
            site, same = (stage.index, name), digest(after) == before
            seen, due = f"other weights than before this {_NOUNS[operation]}", "the same weights, bit for bit"
            yield Claim("updated-parameters", rank, site, same, seen, due)
            if operation == "eval":
                left, there = part.gradients[k], part.begun.get(k)
                same = stands_for_none(left) or (left is not None and there is not None and same_bits(left, there))
                yield Claim(
                    "presence", rank, site, same, "a gradient that evaluation left", "none, or the one before it"
                )


_NOUNS = {"eval": "evaluation", "accumulate": "accumulation"}
