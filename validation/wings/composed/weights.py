"""Initial weights: shared, required to be equal, or equal by chance."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pipeproof.core.cause import Cause
from pipeproof.core.ledger import Ledger
from pipeproof.core.mismatch import Mismatch
from pipeproof.core.observe.digest import contents
from pipeproof.core.observe.elements import bits
from pipeproof.core.observe.shards import local_tensor
from pipeproof.core.observe.sketch import FEW
from pipeproof.core.reason import Reason
from pipeproof.reference.step import Site
from pipeproof.wings.composed.shards import OwnShards

Weights = Mapping[Site, tuple[str, bytes]]  # a rank's part of each parameter, with digest
RENAMED = "rename= gives each weight its name in the whole model, as lambda stage, name: f'{stage}.{name}'"

_LAW = "initial-weights"
_ONE_NAME = (
    "stages {} and {} both have a weight that is called {}{}, and they begin with others in it: {}; if it is one "
    "weight, its copies are apart"
)
_BY_HAND = (
    "{} is another on ranks {} and {}, which run the same microbatches, and no DTensor: layers that are cut by hand "
    "are not put together, and what is on all ranks must be the same there"
)
_EQUAL = "stages {} begin with equal weights: pass build=, or say ties, which tell whether they are one"
_Key = TypeVar("_Key")
_At = TypeVar("_At")


@dataclass(frozen=True)
class WeightHere:
    """A rank's part of a weight at the start, its digest, and whether all elements are equal."""

    part: str
    digest: bytes
    constant: bool
    trains: bool = field(compare=False)


def enter_weights(ledger: Ledger, ranks: Sequence[Weights]) -> None:
    """Enter whether replicas of a stage began with the same weights."""
    every = ((rank, site, *one) for rank, weights in enumerate(ranks) for site, one in weights.items())
    pairs = list(_pairs(((site, part), rank, digest) for rank, site, part, digest in every))
    for ((stage, name), _), at, rank, same in pairs:
        place = Mismatch(_LAW, 1, rank=rank, stage=stage, parameter=name)
        ledger.hold(place, same, "other weights", f"rank {at}'s weights")
    if not pairs:
        ledger.skip(_LAW, "no two ranks have the same part of a weight")


def weights_apart(wrong: Sequence[Mismatch]) -> list[Cause]:
    """Return the causes of ``wrong``, if replicas of a stage began with different weights."""
    apart: dict[tuple[object, int | None, int | None], list[str | None]] = {}
    for one in wrong:
        if one.law == _LAW:
            apart.setdefault((one.expected, one.rank, one.stage), []).append(one.parameter)
    return [
        Cause(
            "replicas-apart",
            rank=rank,
            stage=stage,
            parameter=names[0] if len(names) == 1 else None,
            detail=f"{len(names)} of its parameters are not {expected}",
        )
        for (expected, rank, stage), names in apart.items()
    ]


def not_one(ranks: Sequence[Weights], cure: str = RENAMED) -> str:
    """Say why equally named weights of several stages differ; empty if they agree.

    ``ranks``: one replica's. ``cure``: how to rename a weight.
    """
    every = (pair for weights in ranks for pair in weights.items())
    found: dict[str, tuple[int, int]] = {}
    for (name, _), one, other, same in _pairs(((name, part), stage, one) for (stage, name), (part, one) in every):
        if not same:
            found.setdefault(name, (one, other))
    if not found:
        return ""
    name, (one, other) = next(iter(found.items()))
    more = f", and {len(found) - 1} more" * (len(found) > 1)
    return _ONE_NAME.format(one, other, name, more, cure)


def explain_hand_cut(ranks: Sequence[Weights], replicas: Sequence[int]) -> str:
    """Say why ranks of a replica with different weights under one name are not judged; empty if all agree."""
    every = ((rank, site, *one) for rank, weights in enumerate(ranks) for site, one in weights.items())
    whole = (((replicas[rank], site), rank, digest) for rank, site, part, digest in every if not part)
    return next((_BY_HAND.format(at[1][1], one, other) for at, one, other, same in _pairs(whole) if not same), "")


def weights_here(
    shards: OwnShards, begun: Mapping[int, Mapping[str, bytes]], first: Mapping[str, str]
) -> dict[Site, WeightHere]:
    """Return this rank's part of each weight, by stage and ``first`` name.

    ``begun``: digests, for stages that have them.
    """
    every = {stage: begun.get(stage) or contents(module) for stage, module in shards.stages.modules.items()}
    held: dict[Site, WeightHere] = {}
    for (stage, name), (part, digest) in shards.digests_by_name(every).items():
        one = shards.parameters[name]
        here = local_tensor(one)
        elements = bits(here).view(max(1, here.numel()), -1)  # a complex one has several words
        constant = not any(bool((some != elements[:1]).any()) for some in (elements[:FEW], elements))
        held[stage, first.get(name, name)] = WeightHere(part, digest, constant, one.requires_grad)
    return held


def enter_equal(ledger: Ledger, ranks: Iterable[Mapping[Site, WeightHere]], only: int | None = None) -> dict[str, str]:
    """Leave weights with equal initial values in several stages out of ``ledger``; return reasons by name.

    ``only``: the one stage with compared gradients; None for all.
    """
    why: dict[str, str] = {}
    for stages, names in equal_weights(ranks).items():
        if only is None or only in stages:
            said = Reason.EQUAL_WEIGHTS.doubt(_EQUAL.format(" and ".join(map(str, stages))))
            for law in ("presence", "gradient"):
                ledger.leave_out(law, names, said)
            why |= dict.fromkeys(names, said)
    return why


def equal_weights(ranks: Iterable[Mapping[Site, WeightHere]]) -> dict[tuple[int, ...], list[str]]:
    """Group the names of equal initial weights by their stages: they may be shared or separate.

    ``ranks``: each rank's weights, by first name. Norms and biases begin with one number in any stage: they count only
    beside other weights, for example in copies of a module.
    """
    held: dict[Site, list[WeightHere]] = {}
    for rank in ranks:
        for site, here in rank.items():
            held.setdefault(site, []).append(here)
    first = {name: stage for stage, name in sorted(held, reverse=True)}
    alike: dict[frozenset[WeightHere], list[Site]] = {}
    for name, stage in sorted(first.items(), key=lambda one: one[::-1]):
        alike.setdefault(frozenset(held[stage, name]), []).append((stage, name))
    found: dict[tuple[int, ...], list[str]] = {}
    trained = [sites for sites in alike.values() if any(one.trains for site in sites for one in held[site])]
    for sites in trained:
        if len({stage for stage, _ in sites}) > 1 and not all(one.constant for one in held[sites[0]]):
            found.setdefault(tuple(sorted({stage for stage, _ in sites})), [])
    for stages, names in found.items():
        for sites in trained:
            own = [(stage, name) for stage, name in sites if stage in stages]
            names += [name for _, name in own] if len({stage for stage, _ in own}) > 1 else []
    return found


def _pairs(weights: Iterable[tuple[_Key, _At, bytes]]) -> Iterator[tuple[_Key, _At, _At, bool]]:
    """Yield weights after the first with their key: key, first place, place, and whether they are the same."""
    first: dict[_Key, tuple[_At, bytes]] = {}
    for key, at, digest in weights:
        where, expected = first.setdefault(key, (at, digest))
        if at != where:
            yield key, where, at, digest == expected
