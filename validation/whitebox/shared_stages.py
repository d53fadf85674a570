"""Join ranks that share a stage: their microbatches, and their parts.

Several ranks return replicas of a stage, or shards of its parameters. Common parts must be equal, shards must make up
the whole; then the stage is judged as if on one rank. In a bidirectional pipeline, ranks hold replicas of stages at
mirrored places, without being replicas of each other.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.shards import Shard, find_untiled, flat_shard, in_flat_parts, join_shards
from pipeproof.core.replicas import Replicas
from pipeproof.pipeline.action import Action
from pipeproof.reference.accumulation import add_onto
from pipeproof.whitebox.claims import Member, began, whole_gradient
from pipeproof.whitebox.matching import Local, match
from pipeproof.whitebox.rank import ModulePart, RankMade


def likeness(part: ModulePart) -> tuple[object, ...]:
    """Return a key, equal for parts of one stage. Shards know their peers; names may repeat between stages."""
    peers = next((shard.peers for shard in part.shards.values()), ())
    return (peers, *(one.said or one.identical or one.content or one.name for one in part.locals))


def is_mirrored(made: Sequence[RankMade], known: Mapping[str, bytes]) -> bool:
    """True if ranks hold the whole reference with each stage twice, deliberately, as in DualPipe.

    Requires at least as many stages as ranks: otherwise the model was not cut. known: reference contents by name.
    """
    parts = [part for one in made for part in one.parts]
    held = [local for part in parts for local in part.locals]
    stages = Counter(map(likeness, parts))
    whole = {local.content for local in held} >= set(known.values()) or {local.name for local in held} >= known.keys()
    return whole and set(stages.values()) == {2} and len(stages) >= len(made)


_APART = 1 << 32  # gap between two ranks' call times: longer than any step


def join_parts(
    made: Sequence[RankMade], replicas: Replicas, known: Mapping[str, bytes] = MappingProxyType({})
) -> list[RankMade]:
    """Join each stage's parts on its first rank, and renumber microbatches globally.

    known: reference contents by name.
    """
    bundles = _of_places(made, replicas.together, known) if replicas.together else _of_list(made, replicas, known)
    lines = _lines(bundles, replicas, len(made))
    return [
        replace(
            one,
            parts=tuple(_merge(bundle, replicas, lines) for bundle in bundles if bundle[0][0] == rank),
            actions=None if one.actions is None else tuple(_renumber_actions(one.actions, replicas.share(rank))),
            share=tuple(replicas.share(rank)),
            line=lines[rank],
        )
        for rank, one in enumerate(made)
    ]


def _lines(bundles: Sequence[Sequence[Member]], replicas: Replicas, ranks: int) -> list[int]:
    """Return each rank's line: its index among ranks with the same stages and data.

    A bidirectional pipeline has one line: ranks on one stage have separate microbatches.
    """
    found: dict[int, int] = {}
    for bundle in bundles:
        times: Counter[int] = Counter()
        for rank, _ in bundle:
            found[rank] = min(found.get(rank, ranks), times[replicas.of[rank]])
            times[replicas.of[rank]] += not _in_turn(bundle, replicas)
    return [found.get(rank, 0) for rank in range(ranks)]


def _in_turn(bundle: Sequence[Member], replicas: Replicas) -> bool:
    """True if ranks on one stage have separate microbatches without being replicas."""
    return replicas.count == 1 and not replicas.together and not any(part.shards for _, part in bundle)


def _bundles(made: Sequence[RankMade], replicas: Replicas, *, apart: bool) -> list[list[Member]]:
    """Group parts into stages: alike, on different ranks, and sharded or from different replicas.

    apart: also group equal stages on ranks that are not replicas.
    """
    bundles: list[list[Member]] = []
    for rank, one in enumerate(made):
        for part in one.parts:
            bundle = next((known for known in bundles if _belongs(rank, part, known, replicas, apart=apart)), None)
            if bundle is None:
                bundles.append([(rank, part)])
            else:
                bundle.append((rank, part))
    return bundles


def _of_list(made: Sequence[RankMade], replicas: Replicas, known: Mapping[str, bytes]) -> list[list[Member]]:
    """Group parts for a list of replicas, by likeness.

    If a replica lacks some stage, the list's order decides, unless like stages lie at several places: then replicas
    differ in order.
    """
    found = _bundles(made, replicas, apart=replicas.count == 1 and is_mirrored(made, known))
    held = [bundle for bundle in found if bundle[0][1].locals]
    lacking = any(len({replicas.of[rank] for rank, _ in bundle}) < replicas.count for bundle in held)
    places, times = replicas.places, Counter(replicas.of)
    in_order = all(len({places[rank] for rank, _ in bundle}) == 1 for bundle in held)
    if lacking and in_order and len({*times.values()}) == 1:
        return _of_places(made, places, known)
    return [_with_whole_weights(bundle) for bundle in found]


def _of_places(made: Sequence[RankMade], places: Sequence[int], known: Mapping[str, bytes]) -> list[list[Member]]:
    """Group parts by declared places, each with all members' parameters in one order."""
    bundles: dict[tuple[int, int], list[Member]] = {}
    for rank, one in enumerate(made):
        for chunk, part in enumerate(one.parts):
            bundles.setdefault((places[rank], chunk), []).append((rank, part))
    for (place, _), bundle in bundles.items():
        if _lies_flat(bundle) and all(part.nameless for _, part in bundle):
            holders = [rank for rank, _ in bundle]
            bundle += [
                (rank, ModulePart((), ())) for rank, at in enumerate(places) if at == place and rank not in holders
            ]
    return [_unite(_with_whole_weights(bundle), known) for bundle in bundles.values()]


def _with_whole_weights(bundle: Sequence[Member]) -> list[Member]:
    """Join sharded weights on each rank: its own part, with others' parts.

    So a rank with a wrong part has different weights from the first. Incomplete weights stay unknown.
    """
    lying: dict[str, list[tuple[ModulePart, tuple[Shard, Tensor]]]] = {}
    for _, part in bundle:
        for k, one in part.weights.items():
            lying.setdefault(part.locals[k].name, []).append((part, one))
    made = []
    for rank, part in bundle:
        locals_, values = list(part.locals), dict(part.values)
        for k, own in part.weights.items():
            every = [own, *(one for of, one in lying[part.locals[k].name] if of is not part)]  # the first wins
            whole = None if find_untiled([shard for shard, _ in every]) else join_shards(every)
            if whole is not None:
                locals_[k], values[k] = replace(locals_[k], content=digest(whole)), whole
        made.append((rank, replace(part, locals=tuple(locals_), values=values, weights={})))
    return made


def _unite(bundle: Sequence[Member], known: Mapping[str, bytes]) -> list[Member]:
    """Number all members' parameters alike, and name the missing ones.

    A part's other parameters identify its own: two ranks may give two experts one name. Only a part without any
    reference parameter is matched by equal names elsewhere.
    """
    numbers: dict[object, int] = {}
    locals_: list[Local] = []
    own: list[dict[int, int]] = []
    count = Counter(known.values())
    names = {content: name for name, content in known.items() if count[content] == 1}
    sure = [{one.name: name for one in part.locals if (name := _sure(one, names)) is not None} for _, part in bundle]
    others = {mate: name for one in sure for mate, name in one.items()}
    for (_, part), matched in zip(bundle, sure, strict=True):
        found = match([part.locals], known).names
        times: Counter[object] = Counter()
        own.append({})
        for k, one in enumerate(part.locals):
            name = found.get((0, k)) if matched else others.get(one.name, found.get((0, k)))
            key = (name or one.name, name is None)
            times[key] += 1
            number = numbers.setdefault((key, times[key]), len(numbers))
            if number == len(locals_):
                locals_.append(replace(one, said=name or one.said))
            own[-1][number] = k
    made = [(rank, _renumber_part(part, locals_, at)) for (rank, part), at in zip(bundle, own, strict=True)]
    flat = _lies_flat(bundle)  # then absence from a mapping means no part, rather than no parameter
    return [(rank, replace(part, lacks=frozenset()) if flat and part.nameless else part) for rank, part in made]


def _sure(one: Local, names: Mapping[bytes, str]) -> str | None:
    """Return its reference name, unless its own name is the only hint; ``names``: by unique content."""
    return one.said or one.identical or (None if one.content is None else names.get(one.content))


def _renumber_part(part: ModulePart, locals_: Sequence[Local], own: Mapping[int, int]) -> ModulePart:
    """Renumber ``part`` to ``locals_``; number n was ``own[n]``."""
    return replace(
        part,
        locals=tuple(replace(part.locals[own[n]], said=one.said) if n in own else one for n, one in enumerate(locals_)),
        gradients=tuple(part.gradients[own[n]] if n in own else None for n in range(len(locals_))),
        values={n: part.values[k] for n, k in own.items() if k in part.values},
        shards={n: part.shards[k] for n, k in own.items() if k in part.shards},
        after={n: part.after[k] for n, k in own.items() if k in part.after},
        lacks=frozenset(range(len(locals_))) - own.keys(),
    )


def _belongs(rank: int, part: ModulePart, bundle: Sequence[Member], replicas: Replicas, *, apart: bool) -> bool:
    ranks = [at for at, _ in bundle]
    if rank in ranks or likeness(part) != likeness(bundle[0][1]):
        return False
    return apart or bool(part.shards) or replicas.of[rank] not in [replicas.of[at] for at in ranks]


def _merge(bundle: Sequence[Member], replicas: Replicas, lines: Sequence[int]) -> ModulePart:
    if _lies_flat(bundle):
        bundle = [(rank, _flatten(part)) for rank, part in bundle]
    _, first = bundle[0]
    if len(bundle) == 1 and not first.shards:
        return replace(first, members=tuple(bundle))
    holders = [[part for _, part in bundle if k not in part.lacks] for k in range(len(first.locals))]
    calls = _calls(bundle, replicas, lines)
    return replace(
        first,
        gradients=tuple(whole_gradient(k, parts) for k, parts in enumerate(holders)),
        values={k: parts[0].values[k] for k, parts in enumerate(holders) if k in parts[0].values},
        shards={k: parts[0].shards[k] for k, parts in enumerate(holders) if k in parts[0].shards},
        after={k: (None, whole) for k, parts in enumerate(holders) if (whole := _join_updates(k, parts)) is not None},
        begun={
            k: left
            for k, parts in enumerate(holders)
            if (left := add_onto([part.begun.get(k) for part in parts])) is not None
        },
        calls=calls.pop(0, None),
        copies=calls,
        members=tuple(bundle),
    )


def _join_updates(k: int, holders: Sequence[ModulePart]) -> Tensor | None:
    """Return a parameter after the step. None if unknown or incomplete."""
    lying = [part.after[k] for part in holders if k in part.after]
    parts = [(shard, weight) for shard, weight in lying if shard is not None]
    if not parts:
        return lying[0][1] if lying else None
    return None if find_untiled([shard for shard, _ in parts]) else join_shards(parts)


def _lies_flat(bundle: Sequence[Member]) -> bool:
    return in_flat_parts(shard for _, part in bundle for shard in part.shards.values())


def _flatten(part: ModulePart) -> ModulePart:
    """Convert a part in flat shards: a whole tensor becomes a full shard, an absent one an empty shard."""
    gradients, shards = list(part.gradients), dict(part.shards)
    for k, gradient in enumerate(gradients):
        if k not in shards:
            gradients[k] = None if gradient is None else gradient.flatten()
            shards[k] = flat_shard(0, gradients[k])
    return replace(part, gradients=tuple(gradients), shards=shards)


def _calls(bundle: Sequence[Member], replicas: Replicas, lines: Sequence[int]) -> dict[int, tuple[Call, ...]]:
    """Return each watched line's calls, rank after rank."""
    if replicas.sequence:
        return {}  # ranks hold parts of the reference's tensors
    found: dict[int, tuple[Call, ...]] = {}
    in_turn = _in_turn(bundle, replicas)
    for line in sorted({lines[rank] for rank, _ in bundle}):
        own = [(rank, part.calls) for rank, part in reversed(bundle) if lines[rank] == line]
        observed = sorted({rank if in_turn else replicas.of[rank]: (rank, calls) for rank, calls in own}.items())
        every = [(number * _APART, rank, calls) for number, (_, (rank, calls)) in enumerate(observed)]
        if all(calls is not None for *_, calls in every):
            found[line] = tuple(call.later(time, rank=rank) for time, rank, calls in every for call in calls or ())
    return found


def _renumber_actions(actions: Sequence[Action], share: Sequence[int]) -> Iterator[Action]:
    """Renumber actions globally; foreign microbatches get unused numbers."""
    for action in actions:
        known = 0 <= action.microbatch < len(share)
        yield Action(action.stage, action.kind, share[action.microbatch] if known else -1 - action.microbatch)


def with_late_weights(made: Sequence[Sequence[RankMade]]) -> list[list[RankMade]]:
    """Return ``made`` by operation, with weights as after all ranks' writes.

    A weight is late if its ranks left different values, but started the next operation with equal ones. After the last
    operation its fate is unknown.
    """
    operations = [[*one] for one in made]
    late: dict[tuple[int, int], set[int]] = {}
    for operation, following in zip(operations, made[1:], strict=False):
        for rank, one in enumerate(operation):
            pairs = list(zip(one.parts, following[rank].parts, strict=True))
            found = [dict(_late_weights(*pair)) for pair in pairs]
            operation[rank] = replace(one, parts=tuple(map(_with_weights, one.parts, found)))
            for chunk, new in enumerate(found):
                late.setdefault((rank, chunk), set()).update(new)
    for rank, one in enumerate(operations[-1]):
        unseen = [dict.fromkeys(late.get((rank, chunk), ())) for chunk in range(len(one.parts))]
        operations[-1][rank] = replace(one, parts=tuple(map(_with_weights, one.parts, unseen)))
    return operations


def _late_weights(part: ModulePart, following: ModulePart) -> Iterator[tuple[int, Tensor]]:
    """Yield late weights by number, with values from the ``following`` operation."""
    for k in part.after:
        left = {digest(one.after[k][1]) for _, one in part.members if k in one.after and one.after[k][0] is None}
        begun = {began(one, k) for _, one in following.members if k not in one.lacks}
        if len(left) > 1 and len(begun) == 1 and k in following.values:
            yield k, following.values[k]


def _with_weights(part: ModulePart, new: Mapping[int, Tensor | None]) -> ModulePart:
    """Replace late weights by ``new`` (None: unobserved), and drop them from members."""
    known = {k: (None, weight) for k, weight in new.items() if weight is not None}
    members = tuple((rank, _drop_late(one, new)) for rank, one in part.members)
    kept = _drop_late(part, new)
    return replace(kept, members=members, after={**kept.after, **known}, late=frozenset(new))


def _drop_late(part: ModulePart, late: Collection[int]) -> ModulePart:
    return replace(part, after={k: weight for k, weight in part.after.items() if k not in late})
