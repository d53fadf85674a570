"""Join ranks that share a stage: their microbatches, and their parts; and claim that what they share is equal.

Several ranks return replicas of a stage, or shards of its parameters. Common parts must be equal, shards must make up
the whole; then the stage is judged as if on one rank. In a bidirectional pipeline, ranks hold replicas of stages at
mirrored places, without being replicas of each other.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from types import MappingProxyType

from torch import Tensor

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.observed import Claim
from pipeproof.core.observe.recording import Site
from pipeproof.core.observe.shards import Shard, find_untiled, flat_shard, in_flat_parts, join_shards
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import error, same_bits, stands_for_none
from pipeproof.pipeline.action import Action
from pipeproof.reference.accumulation import add_onto
from pipeproof.whitebox.matching import Local, match
from pipeproof.whitebox.rank import ModulePart, RankMade
from pipeproof.whitebox.stages_in_order import PlacedStage

Member = tuple[int, ModulePart]  # a rank with its result


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
    """Join each stage's parts on its first rank, and renumber microbatches globally: foreign ones get unused numbers.

    known: reference contents by name.
    """
    bundles = _of_places(made, replicas.together, known) if replicas.together else _of_list(made, replicas, known)
    lines, joined = _lines(bundles, replicas, len(made)), []
    for rank, one in enumerate(made):
        share, actions = tuple(replicas.share(rank)), one.actions
        if actions is not None:
            known_to = range(len(share))
            actions = tuple(Action(s, kind, share[m] if m in known_to else -1 - m) for s, kind, m in actions)
        parts = tuple(_merge(bundle, replicas, lines) for bundle in bundles if bundle[0][0] == rank)
        joined.append(replace(one, parts=parts, actions=actions, share=share, line=lines[rank]))
    return joined


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


def _of_list(made: Sequence[RankMade], replicas: Replicas, known: Mapping[str, bytes]) -> list[list[Member]]:
    """Group parts for a list of replicas, by likeness: on different ranks, and sharded or from different replicas.

    In a bidirectional pipeline, ranks with one stage are no replicas. If a replica lacks some stage, the list's order
    decides, unless like stages lie at several places: then replicas differ in order.
    """
    apart = replicas.count == 1 and is_mirrored(made, known)
    found: list[list[Member]] = []
    for rank, part in ((rank, part) for rank, one in enumerate(made) for part in one.parts):
        for bundle in found:
            ranks = [at for at, _ in bundle]
            if rank in ranks or likeness(part) != likeness(bundle[0][1]):
                continue
            if apart or part.shards or replicas.of[rank] not in [replicas.of[at] for at in ranks]:
                bundle.append((rank, part))
                break
        else:
            found.append([(rank, part)])
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
            whole = join_whole([own, *(one for of, one in lying[part.locals[k].name] if of is not part)])  # own wins
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
    sure: list[dict[str, str]] = []  # by more hints than the own name alone
    for _, part in bundle:
        hints = [(one.name, one.said or one.identical or names.get(one.content or b"")) for one in part.locals]
        sure.append({mate: name for mate, name in hints if name is not None})
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
    flat, made = _lies_flat(bundle), []
    for (rank, part), at in zip(bundle, own, strict=True):
        lacks = frozenset(range(len(locals_))) - at.keys()
        renumbered = replace(
            part,
            locals=tuple(
                replace(part.locals[at[n]], said=one.said) if n in at else one for n, one in enumerate(locals_)
            ),
            gradients=tuple(part.gradients[at[n]] if n in at else None for n in range(len(locals_))),
            values={n: part.values[k] for n, k in at.items() if k in part.values},
            shards={n: part.shards[k] for n, k in at.items() if k in part.shards},
            after={n: part.after[k] for n, k in at.items() if k in part.after},
            lacks=lacks,
        )
        # In flat parts, absence from a mapping means no part, rather than no parameter.
        made.append((rank, replace(renumbered, lacks=frozenset()) if flat and renumbered.nameless else renumbered))
    return made


def _merge(bundle: Sequence[Member], replicas: Replicas, lines: Sequence[int]) -> ModulePart:
    if _lies_flat(bundle):
        bundle = [(rank, _flatten(part)) for rank, part in bundle]
    _, first = bundle[0]
    if len(bundle) == 1 and not first.shards:
        return replace(first, members=tuple(bundle))
    holders = [[part for _, part in bundle if k not in part.lacks] for k in range(len(first.locals))]
    after, begun = dict[int, tuple[None, Tensor]](), dict[int, Tensor]()
    for k, parts in enumerate(holders):
        lying = [part.after[k] for part in parts if k in part.after]
        shards = [(shard, weight) for shard, weight in lying if shard is not None]
        whole = join_whole(shards) if shards else lying[0][1] if lying else None
        after |= {} if whole is None else {k: (None, whole)}
        left = add_onto([part.begun.get(k) for part in parts])
        begun |= {} if left is None else {k: left}
    calls = _calls(bundle, replicas, lines)
    return replace(
        first,
        gradients=tuple(whole_gradient(k, parts) for k, parts in enumerate(holders)),
        values={k: parts[0].values[k] for k, parts in enumerate(holders) if k in parts[0].values},
        shards={k: parts[0].shards[k] for k, parts in enumerate(holders) if k in parts[0].shards},
        after=after,
        begun=begun,
        calls=calls.pop(0, None),
        copies=calls,
        members=tuple(bundle),
    )


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


def with_late_weights(made: Sequence[Sequence[RankMade]]) -> list[list[RankMade]]:
    """Return ``made`` by operation, with weights as after all ranks' writes.

    A weight is late if its ranks left different values, but started the next operation with equal ones. After the last
    operation its fate is unknown.
    """
    operations = [[*one] for one in made]
    every: dict[tuple[int, int], set[int]] = {}
    for operation, following in zip_longest(operations, made[1:]):
        for rank, one in enumerate(operation):
            parts = []
            for chunk, part in enumerate(one.parts):
                late = every.setdefault((rank, chunk), set())
                new: dict[int, Tensor | None] = dict.fromkeys(late if following is None else ())
                if following is not None:
                    new |= _late_weights(part, following[rank].parts[chunk])
                    late.update(new)
                parts.append(_with_weights(part, new))
            operation[rank] = replace(one, parts=tuple(parts))
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
    members = [
        (rank, replace(one, after={k: weight for k, weight in one.after.items() if k not in new}))
        for rank, one in part.members
    ]
    known = {k: (None, weight) for k, weight in new.items() if weight is not None}
    after = {k: weight for k, weight in part.after.items() if k not in new} | known
    return replace(part, members=tuple(members), after=after, late=frozenset(new))


def claims(site: Site, k: int, members: Sequence[Member], replicas: Replicas) -> Iterator[Claim]:
    """Yield claims about parameter ``k`` at ``site``, over all ``members``."""
    members = [(rank, part) for rank, part in members if k not in part.lacks]
    first, other = members[0]
    holders = [(rank, part) for rank, part in members if k in part.shards]
    shards = [part.shards[k] for _, part in holders]
    if any(shard.count or not shard.flat for shard in shards):  # otherwise no rank has a gradient
        without = [rank for rank, part in holders if part.shards[k].count and part.gradients[k] is None]
        wrong = find_untiled(shards)
        if not wrong and without and any(not stands_for_none(part.gradients[k]) for _, part in holders):
            wrong = f"no gradient on rank {without[0]}"  # while others have nonzero ones
        yield Claim("shards", first, site, not wrong, wrong, "parts that make up the whole")
    copies = replicas.copies or replicas.of
    present, count = sorted({copies[rank] for rank, _ in members}), max(copies) + 1
    if count > 1:
        observed = f"held by replica {', '.join(map(str, present))} alone"
        yield Claim("replicas", first, site, len(present) == count, observed, f"held by each of {count} replicas")
    same: dict[Shard | None, Member] = {}
    for rank, part in members:
        leader, alike = same.setdefault(part.shards.get(k), (rank, part))
        if leader != rank:
            holds, observed = _compare_gradients(part.gradients[k], alike.gradients[k], f"rank {leader}")
            yield Claim("replicas", rank, site, holds, observed, f"rank {leader}'s gradient, bit for bit", leader)
        content, others = began(part, k), began(other, k)
        if rank != first and content is not None and others is not None:
            observed = f"other weights than rank {first}'s"
            yield Claim("initial-weights", rank, site, content == others, observed, f"rank {first}'s weights", first)
    leaders: dict[Shard | None, tuple[int, Tensor]] = {}
    for rank, part in members:  # equal shards stay equal after the step
        where, weight = part.after.get(k, (None, None))
        if weight is not None:
            leader, theirs = leaders.setdefault(where, (rank, weight))
            if leader != rank:
                as_before = digest(weight) == began(part, k)
                observed = "the weights of before the step" if as_before else f"other weights than rank {leader}'s"
                holds, expected = same_bits(weight, theirs), f"rank {leader}'s weights, bit for bit"
                yield Claim("updated-parameters", rank, site, holds, observed, expected, leader)


def _compare_gradients(own: Tensor | None, other: Tensor | None, leader: str) -> tuple[bool, str]:
    """Return whether two gradients agree, and how the first differs from the ``leader``'s."""
    if own is None or other is None:
        observed = f"no gradient, and {leader} has one" if own is None else f"a gradient, and {leader} has none"
        return stands_for_none(own) and stands_for_none(other), observed
    if same_bits(own, other):
        return True, ""
    return False, f"another gradient than {leader}'s, relative error {error(own, other):.2g}"


def began(part: ModulePart, k: int) -> bytes | None:
    """Return the starting weights' digest. None if unknown."""
    if k in part.values:
        return digest(part.values[k])
    return None if part.later else part.locals[k].content


def join_whole(parts: Sequence[tuple[Shard, Tensor | None]]) -> Tensor | None:
    """Join ``parts``; None if they make no whole."""
    return None if find_untiled([shard for shard, _ in parts]) else join_shards(parts)


def whole_gradient(k: int, holders: Sequence[ModulePart]) -> Tensor | None:
    """Return a gradient from its first holder, or joined from shards."""
    if k not in holders[0].shards:
        return holders[0].gradients[k]
    whole = join_whole([(part.shards[k], part.gradients[k]) for part in holders if k in part.shards])
    return holders[0].gradients[k] if whole is None else whole


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
