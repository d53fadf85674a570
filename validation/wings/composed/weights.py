"""Weights as a step begins: which are one, which must be equal, and which merely are."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pipeproof.core.cause import Cause
from pipeproof.core.ledger import Heading, Ledger
from pipeproof.core.mismatch import Mismatch
from pipeproof.core.observe.digest import contents
from pipeproof.core.observe.elements import bits
from pipeproof.core.observe.shards import held_here
from pipeproof.core.observe.sketch import FEW
from pipeproof.core.reason import Reason
from pipeproof.reference.step import Site
from pipeproof.wings.composed.shards import OwnShards

Weights = Mapping[Site, tuple[str, bytes]]  # of a rank: which part of each parameter it has, and the digest of that
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
    """What a rank has of a weight as the step begins: which part, and its digest; whether it is one number all over."""

    part: str
    digest: bytes
    constant: bool
    trains: bool = field(compare=False)


def enter_weights(ledger: Ledger, ranks: Sequence[Weights]) -> None:
    """Enter whether replicas of a stage began with the same weights."""
    first: dict[tuple[Site, str], tuple[int, bytes]] = {}
    for rank, weights in enumerate(ranks):
        for (stage, name), (part, digest) in weights.items():
            at, expected = first.setdefault(((stage, name), part), (rank, digest))
            if at != rank:
                place = Heading.at(_LAW, 0, rank=rank, stage=stage, parameter=name)
                ledger.hold(place, digest == expected, "other weights", f"rank {at}'s weights")
    if sum(map(len, ranks)) == len(first):
        ledger.skip(_LAW, "no two ranks have the same part of a weight")


def weights_apart(wrong: Sequence[Mismatch]) -> list[Cause]:
    """The causes of what is ``wrong``, where replicas of a stage began with others."""
    apart: dict[tuple[object, int | None, int | None], list[str | None]] = {}
    for one in wrong:
        if one.law == _LAW:
            apart.setdefault((one.due, one.rank, one.stage), []).append(one.parameter)
    return [
        Cause(
            "replicas-apart",
            rank=rank,
            stage=stage,
            parameter=names[0] if len(names) == 1 else None,
            detail=f"{len(names)} of its parameters are not {due}",
        )
        for (due, rank, stage), names in apart.items()
    ]


def not_one(ranks: Sequence[Weights], cure: str = RENAMED) -> str:
    """Why weights of several stages are not one that they have in common, though they have one name; empty if they are.

    ``ranks``: of one replica. ``cure``: how a weight gets another name.
    """
    every = (pair for weights in ranks for pair in weights.items())
    found: dict[str, tuple[int, int]] = {}
    for (name, _), one, other in _apart(((name, part), stage, one) for (stage, name), (part, one) in every):
        if one != other:
            found.setdefault(name, (one, other))
    if not found:
        return ""
    name, (one, other) = next(iter(found.items()))
    more = f", and {len(found) - 1} more" * (len(found) > 1)
    return _ONE_NAME.format(one, other, name, more, cure)


def cut_by_hand(ranks: Sequence[Weights], replicas: Sequence[int]) -> str:
    """Why ranks of one of the ``replicas`` are not judged that have other weights under one name; empty for others."""
    every = ((rank, site, *one) for rank, weights in enumerate(ranks) for site, one in weights.items())
    whole = (((replicas[rank], site), rank, digest) for rank, site, part, digest in every if not part)
    apart = next(_apart(whole), None)
    if apart is None:
        return ""
    (_, (_, name)), one, other = apart
    return _BY_HAND.format(name, one, other)


def weights_here(
    shards: OwnShards, begun: Mapping[int, Mapping[str, bytes]], first: Mapping[str, str]
) -> dict[Site, WeightHere]:
    """What this rank has of weights, by the stage and the ``first`` name of each.

    ``begun``: their digests, of those stages of which they are known already.
    """
    every = {stage: begun.get(stage) or contents(module) for stage, module in shards.stages.modules.items()}
    held: dict[Site, WeightHere] = {}
    for (stage, name), (part, digest) in shards.named(every).items():
        one = shards.parameters[name]
        here = held_here(one)
        elements = bits(here).view(max(1, here.numel()), -1)  # a complex one has several words
        constant = not any(bool((some != elements[:1]).any()) for some in (elements[:FEW], elements))
        held[stage, first.get(name, name)] = WeightHere(part, digest, constant, one.requires_grad)
    return held


def enter_equal(ledger: Ledger, ranks: Iterable[Mapping[Site, WeightHere]], only: int | None = None) -> dict[str, str]:
    """Leave out of ``ledger`` the weights of all ``ranks`` that begin equal in several stages; gives why, by name.

    ``only``: the one stage whose gradients are compared, if not all are.
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
    """By stages that have an equal weight, the names of all weights that are equal there: they may be one or several.

    ``ranks``: what each rank has, by the first name of each parameter. Norms and biases begin with one number in any
    stage: they count only beside other weights, as where stages have copies of a module.
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


def _apart(weights: Iterable[tuple[_Key, _At, bytes]]) -> Iterator[tuple[_Key, _At, _At]]:
    """Of weights with one key those with another digest than the first: the key, where that one is, and where they."""
    first: dict[_Key, tuple[_At, bytes]] = {}
    for key, at, digest in weights:
        where, expected = first.setdefault(key, (at, digest))
        if digest != expected:
            yield key, where, at
