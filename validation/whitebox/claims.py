"""Claims between ranks about a shared stage, or before and after an operation."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.observed import Claim
from pipeproof.core.observe.recording import Site
from pipeproof.core.observe.shards import Shard, find_untiled, join_shards
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import error, same_bits, stands_for_none
from pipeproof.whitebox.rank import ModulePart
from pipeproof.whitebox.stages_in_order import PlacedStage

Member = tuple[int, ModulePart]  # a rank with its result


def claims(site: Site, k: int, members: Sequence[Member], replicas: Replicas) -> Iterator[Claim]:
    """Yield claims about parameter ``k`` at ``site``, over all ``members``."""
    members = [(rank, part) for rank, part in members if k not in part.lacks]
    first = members[0][0]
    shards = [part.shards[k] for _, part in members if k in part.shards]
    if any(shard.count or not shard.flat for shard in shards):  # otherwise no rank has a gradient
        wrong = find_untiled(shards) or _absent(k, members)
        yield Claim("shards", first, site, not wrong, wrong, "parts that make up the whole")
    copies = replicas.copies or replicas.of
    present, count = sorted({copies[rank] for rank, _ in members}), max(copies) + 1
    if count > 1:
        observed = f"held by replica {', '.join(map(str, present))} alone"
        yield Claim("replicas", first, site, len(present) == count, observed, f"held by each of {count} replicas")
    same: dict[Shard | None, Member] = {}
    for rank, part in members:
        leader, other = same.setdefault(part.shards.get(k), (rank, part))
        if leader != rank:
            yield _equal_gradients(site, (rank, part.gradients[k]), (leader, other.gradients[k]))
        content, others = began(part, k), began(members[0][1], k)
        if rank != first and content is not None and others is not None:
            observed = f"other weights than rank {first}'s"
            yield Claim("initial-weights", rank, site, content == others, observed, f"rank {first}'s weights", first)
    yield from _equal_weights(site, k, members)


def began(part: ModulePart, k: int) -> bytes | None:
    """Return the starting weights' digest. None if unknown."""
    if k in part.values:
        return digest(part.values[k])
    return None if part.later else part.locals[k].content


def _equal_weights(site: Site, k: int, members: Sequence[Member]) -> Iterator[Claim]:
    """Yield claims that equal shards of parameter ``k`` stay equal after the step."""
    leaders: dict[Shard | None, tuple[int, Tensor]] = {}
    for rank, part in members:
        if k in part.after:
            where, weight = part.after[k]
            leader, other = leaders.setdefault(where, (rank, weight))
            if leader != rank:
                as_before = digest(weight) == began(part, k)
                observed = "the weights of before the step" if as_before else f"other weights than rank {leader}'s"
                same, expected = same_bits(weight, other), f"rank {leader}'s weights, bit for bit"
                yield Claim("updated-parameters", rank, site, same, observed, expected, leader)


def _equal_gradients(site: Site, one: tuple[int, Tensor | None], two: tuple[int, Tensor | None]) -> Claim:
    (rank, own), (leader, other) = one, two
    if own is None or other is None:
        same = stands_for_none(own) and stands_for_none(other)
        observed = "no gradient, and rank {} has one" if own is None else "a gradient, and rank {} has none"
        observed = observed.format(leader)
    else:
        same = same_bits(own, other)
        observed = "" if same else f"another gradient than rank {leader}'s, relative error {error(own, other):.2g}"
    return Claim("replicas", rank, site, same, observed, f"rank {leader}'s gradient, bit for bit", leader)


def _absent(k: int, members: Sequence[Member]) -> str:
    """Name a rank without a gradient for its shard, while others have nonzero ones."""
    holders = [(rank, part) for rank, part in members if part.shards[k].count]
    without = [rank for rank, part in holders if part.gradients[k] is None]
    some = any(not stands_for_none(part.gradients[k]) for _, part in holders)
    return f"no gradient on rank {without[0]}" if without and some else ""


def whole_gradient(k: int, holders: Sequence[ModulePart]) -> Tensor | None:
    """Return a gradient from its first holder, or joined from shards."""
    if k not in holders[0].shards:
        return holders[0].gradients[k]
    lying = [(part.shards[k], part.gradients[k]) for part in holders if k in part.shards]
    return holders[0].gradients[k] if find_untiled([shard for shard, _ in lying]) else join_shards(lying)


def claim_unchanged(stage: PlacedStage, operation: str) -> Iterator[Claim]:
    """Yield claims that an operation without an update keeps weights, and an evaluation also gradients.

    Covers parameters in ``stage`` that were used and are whole.
    """
    noun = {"eval": "evaluation", "accumulate": "accumulation"}[operation]
    for rank, part in stage.part.members:
        for k, name in stage.names.items():
            where, after = part.after.get(k, (None, None))
            before = None if k in part.lacks or k in part.shards else began(part, k)
            if after is None or where is not None or before is None:
                continue
            site, observed = (stage.index, name), f"other weights than before this {noun}"
            expected = "the same weights, bit for bit"
            yield Claim("updated-parameters", rank, site, digest(after) == before, observed, expected)
            if operation == "eval":
                left, there = part.gradients[k], part.begun.get(k)
                same = stands_for_none(left) or (left is not None and there is not None and same_bits(left, there))
                observed, expected = "a gradient that evaluation left", "none, or the one before it"
                yield Claim("presence", rank, site, same, observed, expected)
