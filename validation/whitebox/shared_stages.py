"""Ranks that hold the same stage: which microbatches each is given, and their parts put together as one.

Replicas of a stage, or shards of its parameters, are handed back by several ranks. What they hold in common must be
equal, what they hold apart must make up the whole; after that, the stage is judged as if one rank had it all.
In a bidirectional pipeline ranks hold replicas of stages, at mirrored places, without being replicas of each other.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.shards import Shard, flat_shard, gathered, in_flat_parts, untiled
from pipeproof.core.replicas import Replicas
from pipeproof.pipeline.action import Action
from pipeproof.reference.accumulation import added_onto
from pipeproof.whitebox.claims import Member, began, whole_gradient
from pipeproof.whitebox.matching import Local, match
from pipeproof.whitebox.rank import ModulePart, RankMade


def likeness(part: ModulePart) -> tuple[object, ...]:
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


_APART = 1 << 32  # between the times of two ranks' calls: more than any step takes


def join_parts(
    made: Sequence[RankMade], replicas: Replicas, known: Mapping[str, bytes] = MappingProxyType({})
) -> list[RankMade]:
    """``made``, with what several ranks hold of one stage on the first of them, and microbatches numbered as given.

    ``known``: the contents of the reference's parameters by name.
    """
    bundles = _of_places(made, replicas.together, known) if replicas.together else _of_list(made, replicas, known)
    lines = _lines(bundles, replicas, len(made))
    return [
        replace(
            one,
            parts=tuple(_merged(bundle, replicas, lines) for bundle in bundles if bundle[0][0] == rank),
            actions=None if one.actions is None else tuple(_renumbered(one.actions, replicas.share(rank))),
            share=tuple(replicas.share(rank)),
            line=lines[rank],
        )
        for rank, one in enumerate(made)
    ]


def _lines(bundles: Sequence[Sequence[Member]], replicas: Replicas, ranks: int) -> list[int]:
    """The line of every rank: which it is of those with the same stages and the same data.

    In a bidirectional pipeline all are of one line: ranks with the same stage have microbatches of their own.
    """
    found: dict[int, int] = {}
    for bundle in bundles:
        times: Counter[int] = Counter()
        for rank, _ in bundle:
            found[rank] = min(found.get(rank, ranks), times[replicas.of[rank]])
            times[replicas.of[rank]] += not _in_turn(bundle, replicas)
    return [found.get(rank, 0) for rank in range(ranks)]


def _in_turn(bundle: Sequence[Member], replicas: Replicas) -> bool:
    """Whether ranks with the same stage have microbatches of their own without being replicas of each other."""
    return replicas.count == 1 and not replicas.together and not any(part.shards for _, part in bundle)


def _bundles(made: Sequence[RankMade], replicas: Replicas, *, apart: bool) -> list[list[Member]]:
    """The parts that are one stage: alike, on different ranks, and shards or of different replicas.

    ``apart``: or replicas of a stage on ranks that are not replicas of each other.
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
    """The parts of every stage of a list of replicas: those that are alike.

    Where some replica lacks one like a stage of another's, the list says which those are, unless ranks of several
    places have stages that are alike: then its replicas are not in one order.
    """
    found = _bundles(made, replicas, apart=replicas.count == 1 and mirrored(made, known))
    held = [bundle for bundle in found if bundle[0][1].locals]
    lacking = any(len({replicas.of[rank] for rank, _ in bundle}) < replicas.count for bundle in held)
    places, times = replicas.places, Counter(replicas.of)
    in_order = all(len({places[rank] for rank, _ in bundle}) == 1 for bundle in held)
    if lacking and in_order and len({*times.values()}) == 1:
        return _of_places(made, places, known)
    return [_with_whole_weights(bundle) for bundle in found]


def _of_places(made: Sequence[RankMade], places: Sequence[int], known: Mapping[str, bytes]) -> list[list[Member]]:
    """The parts of every stage, where it is said which ranks hold it: all with the parameters of all in one order."""
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
    return [_united(_with_whole_weights(bundle), known) for bundle in bundles.values()]


def _with_whole_weights(bundle: Sequence[Member]) -> list[Member]:
    """``bundle``, with weights of which every rank has a part put together: each rank's own part, beside the others'.

    So a rank whose part is wrong has other weights than the first. What is not all there stays unknown.
    """
    lying: dict[str, list[tuple[ModulePart, tuple[Shard, Tensor]]]] = {}
    for _, part in bundle:
        for k, one in part.weights.items():
            lying.setdefault(part.locals[k].name, []).append((part, one))
    made = []
    for rank, part in bundle:
        locals_, values = list(part.locals), dict(part.values)
        for k, own in part.weights.items():
            every = [own, *(one for of, one in lying[part.locals[k].name] if of is not part)]  # the first counts
            whole = None if untiled([shard for shard, _ in every]) else gathered(every)
            if whole is not None:
                locals_[k], values[k] = replace(locals_[k], content=digest(whole)), whole
        made.append((rank, replace(part, locals=tuple(locals_), values=values, weights={})))
    return made


def _united(bundle: Sequence[Member], known: Mapping[str, bytes]) -> list[Member]:
    """Every part with the parameters of all of them, each under one number; those that it lacks are named.

    A part's parameters are told by what else it has: two ranks may call two experts by one name. Only where nothing in
    it is the reference's, they are told by what others of the same name are.
    """
    numbers: dict[object, int] = {}
    locals_: list[Local] = []
    own: list[dict[int, int]] = []
    count = Counter(known.values())
    names = {content: name for name, content in known.items() if count[content] == 1}
    sure = [{one.name: name for one in part.locals if (name := _sure(one, names)) is not None} for _, part in bundle]
    others = {mate: name for one in sure for mate, name in one.items()}
    for (_, part), told_here in zip(bundle, sure, strict=True):
        found = match([part.locals], known).names
        times: Counter[object] = Counter()
        own.append({})
        for k, one in enumerate(part.locals):
            name = found.get((0, k)) if told_here else others.get(one.name, found.get((0, k)))
            told = (name or one.name, name is None)
            times[told] += 1
            number = numbers.setdefault((told, times[told]), len(numbers))
            if number == len(locals_):
                locals_.append(replace(one, said=name or one.said))
            own[-1][number] = k
    made = [(rank, _numbered(part, locals_, at)) for (rank, part), at in zip(bundle, own, strict=True)]
    flat = _lies_flat(bundle)  # then what a mapping leaves out is no part, and not a parameter that the rank lacks
    return [(rank, replace(part, lacks=frozenset()) if flat and part.nameless else part) for rank, part in made]


def _sure(one: Local, names: Mapping[bytes, str]) -> str | None:
    """What it is in the reference, where more than its name tells; ``names``: by weights that one alone has there."""
    return one.said or one.identical or (None if one.content is None else names.get(one.content))


def _numbered(part: ModulePart, locals_: Sequence[Local], own: Mapping[int, int]) -> ModulePart:
    """``part`` with the parameters ``locals_``, of which number n is its own number ``own[n]``."""
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


def _merged(bundle: Sequence[Member], replicas: Replicas, lines: Sequence[int]) -> ModulePart:
    if _lies_flat(bundle):
        bundle = [(rank, _flattened(part)) for rank, part in bundle]
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
        after={k: (None, whole) for k, parts in enumerate(holders) if (whole := _updated(k, parts)) is not None},
        begun={
            k: left
            for k, parts in enumerate(holders)
            if (left := added_onto([part.begun.get(k) for part in parts])) is not None
        },
        calls=calls.pop(0, None),
        copies=calls,
        members=tuple(bundle),
    )


def _updated(k: int, holders: Sequence[ModulePart]) -> Tensor | None:
    """A parameter after the step; None where that is not known, or not all there."""
    lying = [part.after[k] for part in holders if k in part.after]
    parts = [(shard, weight) for shard, weight in lying if shard is not None]
    if not parts:
        return lying[0][1] if lying else None
    return None if untiled([shard for shard, _ in parts]) else gathered(parts)


def _lies_flat(bundle: Sequence[Member]) -> bool:
    return in_flat_parts(shard for _, part in bundle for shard in part.shards.values())


def _flattened(part: ModulePart) -> ModulePart:
    """``part`` of a stage in flat parts: what it has whole is all of a flat one, and nothing an empty one."""
    gradients, shards = list(part.gradients), dict(part.shards)
    for k, gradient in enumerate(gradients):
        if k not in shards:
            gradients[k] = None if gradient is None else gradient.flatten()
            shards[k] = flat_shard(0, gradients[k])
    return replace(part, gradients=tuple(gradients), shards=shards)


def _calls(bundle: Sequence[Member], replicas: Replicas, lines: Sequence[int]) -> dict[int, tuple[Call, ...]]:
    """Of every line that was watched, the calls of its ranks, one after the other."""
    if replicas.sequence:
        return {}  # a rank's tensors are parts of the reference's
    found: dict[int, tuple[Call, ...]] = {}
    in_turn = _in_turn(bundle, replicas)
    for line in sorted({lines[rank] for rank, _ in bundle}):
        own = [(rank, part.calls) for rank, part in reversed(bundle) if lines[rank] == line]
        seen = sorted({rank if in_turn else replicas.of[rank]: (rank, calls) for rank, calls in own}.items())
        every = [(number * _APART, rank, calls) for number, (_, (rank, calls)) in enumerate(seen)]
        if all(calls is not None for *_, calls in every):
            found[line] = tuple(call.later(time, rank=rank) for time, rank, calls in every for call in calls or ())
    return found


def _renumbered(actions: Sequence[Action], share: Sequence[int]) -> Iterator[Action]:
    """A microbatch that the rank was not given keeps a number that none has."""
    for action in actions:
        known = 0 <= action.microbatch < len(share)
        yield Action(action.stage, action.kind, share[action.microbatch] if known else -1 - action.microbatch)


def with_late_weights(made: Sequence[Sequence[RankMade]]) -> list[list[RankMade]]:
    """``made``, by operation, with weights after each as they are once all ranks have written them.

    A weight is late where ranks that hold it left others in it, and began the next operation with the same. After the
    last operation it does not show what becomes of such a one.
    """
    operations = [[*one] for one in made]
    late: dict[tuple[int, int], set[int]] = {}
    for operation, following in zip(operations, made[1:], strict=False):
        for rank, one in enumerate(operation):
            pairs = list(zip(one.parts, following[rank].parts, strict=True))
            found = [dict(_written_late(*pair)) for pair in pairs]
            operation[rank] = replace(one, parts=tuple(map(_with_weights, one.parts, found)))
            for chunk, new in enumerate(found):
                late.setdefault((rank, chunk), set()).update(new)
    for rank, one in enumerate(operations[-1]):
        unseen = [dict.fromkeys(late.get((rank, chunk), ())) for chunk in range(len(one.parts))]
        operations[-1][rank] = replace(one, parts=tuple(map(_with_weights, one.parts, unseen)))
    return operations


def _written_late(part: ModulePart, following: ModulePart) -> Iterator[tuple[int, Tensor]]:
    """The late weights of ``part``, by number, as the ``following`` operation began with them."""
    for k in part.after:
        left = {digest(one.after[k][1]) for _, one in part.members if k in one.after and one.after[k][0] is None}
        begun = {began(one, k) for _, one in following.members if k not in one.lacks}
        if len(left) > 1 and len(begun) == 1 and k in following.values:
            yield k, following.values[k]


def _with_weights(part: ModulePart, new: Mapping[int, Tensor | None]) -> ModulePart:
    """``part``, whose weights after the operation are ``new`` (None: not seen), and those of no member of it."""
    known = {k: (None, weight) for k, weight in new.items() if weight is not None}
    members = tuple((rank, _without(one, new)) for rank, one in part.members)
    kept = _without(part, new)
    return replace(kept, members=members, after={**kept.after, **known}, late=frozenset(new))


def _without(part: ModulePart, late: Collection[int]) -> ModulePart:
    return replace(part, after={k: weight for k, weight in part.after.items() if k not in late})
