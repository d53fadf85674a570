"""Which experts the ranks chose, by the routers and the microbatches of the reference."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import inf

from pipeproof.core.routes import explained
from pipeproof.core.tolerance import Floor
from pipeproof.foreign.assemble import Assembled
from pipeproof.foreign.stages_in_order import PlacedStage
from pipeproof.foreign.token_order import LESS, in_order, joined, short
from pipeproof.observers.observed import Routed
from pipeproof.observers.routes import Route, Routes
from pipeproof.pipeline.sizes import some
from pipeproof.reference.choices import Choice, Choices, Chosen, same_T
from pipeproof.reference.contribution import Contribution

_UNSEEN = "no router was seen to choose, as where torch.compile or a kernel of its own does"
_UNORDERED = "for tokens in parts, whose order does not show"
_Calls = Sequence[Mapping[str, Sequence[Route]]]  # of a stage, by the reference's router


@dataclass(frozen=True)
class Routing:
    """What every rank's routers chose; ``untold``: why that of some is not compared, in words.

    ``wrong``: the routers, each with a microbatch, whose choices rounding does not explain.
    """

    ranks: Mapping[int, Mapping[Routed, Sequence[Route]]] = field(default_factory=dict)
    untold: str = ""
    wrong: Collection[tuple[str, int]] = frozenset()

    @staticmethod
    def of(found: Assembled, made: Sequence[Contribution]) -> "Routing":
        """It, of the ranks that were ``found``; ``made``: what the reference has of each microbatch."""
        ranks: dict[int, dict[Routed, Sequence[Route]]] = {}
        untold: list[str] = []
        every = {name: choices for one in reversed(made) for name, choices in one.choices.items()}
        for stage in found.stages:
            routers = [name for name in every if _stage_of(name, found.owner) == stage.index]
            for rank, routes, parts in _bundles(stage, found, every, routers):
                share = found.made[rank].share or range(len(made))
                calls, why = _calls(routes, routers, [made[m] for m in share], parts)
                untold += [f"{why} on rank {rank}"] if why else []
                for m, call in zip(_order(calls, share, made), calls, strict=True):
                    own = {Routed(stage.index, name, m): chosen for name, chosen in call.items()}
                    if own:
                        ranks.setdefault(rank, {}).update(own)
        if not any(one.choices for one in made):
            untold = ["the reference's modules of these names call no topk, argmax or max in their forward"]
        return Routing(ranks, untold[0] if untold else "")

    def with_wrong(self, made: Sequence[Contribution], floor: Callable[[int, str, int], Floor]) -> "Routing":
        """The same, with what is ``wrong``, and without what later routers chose for the microbatch: that follows.

        ``made``: by a reference that chose as the ranks. ``floor``: of a microbatch's scores, by router and choice.
        """
        wrong, kept = set[tuple[str, int]](), set[tuple[str, int]]()
        for m, (one, told) in enumerate(zip(made, self._first(len(made)), strict=True)):
            for name, choices in one.choices.items():
                kept.add((name, m))
                pairs = enumerate(zip(told.get(name, ()), choices, strict=False))
                if not all(explained(route, choice, partial(floor, m, name, n)) for n, (route, choice) in pairs):
                    wrong.add((name, m))
                    break
        ranks = {
            rank: {at: every for at, every in routes.items() if (at.router, at.microbatch) in kept}
            for rank, routes in self.ranks.items()
        }
        return replace(self, ranks=ranks, wrong=wrong)

    def told(self, microbatches: int) -> tuple[dict[str, Chosen], ...]:
        """By microbatch, what each router chose on the first rank that has it, but for what is ``wrong``."""
        return tuple(
            {name: [one.chosen_TK for one in every] for name, every in routes.items() if (name, m) not in self.wrong}
            for m, routes in enumerate(self._first(microbatches))
        )

    def _first(self, microbatches: int) -> tuple[dict[str, Sequence[Route]], ...]:
        """By microbatch, what each router chose on the first rank that has it."""
        found: tuple[dict[str, Sequence[Route]], ...] = tuple({} for _ in range(microbatches))
        for routes in (self.ranks[rank] for rank in sorted(self.ranks)):
            for at, every in routes.items():
                found[at.microbatch].setdefault(at.router, every)
        return found

    def differs(self, made: Sequence[Contribution]) -> bool:
        """Whether any router chose otherwise than in ``made``."""
        return any(
            not seen.equal(choice.chosen_TK.cpu())
            for one, told in zip(made, self.told(len(made)), strict=True)
            for name, every in told.items()
            for seen, choice in zip(every, one.choices[name], strict=True)
        )


UNROUTED = Routing()  # of ranks whose routers nobody looks at


def _stage_of(router: str, owner: Mapping[str, int]) -> int | None:
    """The stage that has it: that of its parameters, or else of those beside it."""
    within = router
    while within:
        held = [stage for name, stage in owner.items() if name.startswith(f"{within}.")]
        if held:
            return held[0]
        within = within.rpartition(".")[0]
    return next(iter(owner.values()), None)


def _bundles(
    stage: PlacedStage, found: Assembled, choices: Choices, routers: Sequence[str]
) -> Iterator[tuple[int, Routes, int]]:
    """What the routers of a stage chose, rank by rank; of ranks that have parts of the same tokens, all on the first.

    Each with in how many parts it came.
    """
    members = stage.part.members or ((stage.rank, stage.part),)
    together: dict[tuple[int, ...] | None, list[tuple[int, Routes]]] = {}
    for rank, part in members if routers else ():
        together.setdefault(found.made[rank].share, []).append((rank, part.routes))
    for bundle in together.values():
        every = [routes for _, routes in bundle]
        tokens = [len(next(iter(routes.values()))[0].chosen_TK) if routes else 0 for routes in every]
        counts = {tuple(len(one) for one in routes.values()) for routes in every}
        whole = len(choices[routers[0]][0].own_TK)
        if len(bundle) > 1 and len(counts) == 1 and len({*tokens}) == 1 and sum(tokens) == whole:
            yield bundle[0][0], joined(every), len(bundle)
        else:
            yield from ((rank, routes, 1) for rank, routes in bundle)


def _calls(seen: Routes, routers: Sequence[str], made: Sequence[Contribution], parts: int) -> tuple[_Calls, str]:
    """What a stage's routers chose, call by call; none where that is not like what was ``made``, and why in words."""
    if not seen:
        return [], _UNSEEN
    if len(seen) != len(routers):
        return [], f"{some(len(seen), 'router')} chose where the reference has {', '.join(routers)}"
    calls: list[dict[str, Sequence[Route]]] = [{} for _ in made]
    untold: list[str] = []
    for name, (local, routes) in zip(routers, seen.items(), strict=True):
        own, why = _own_calls(name, routes, made, parts)
        untold += [f"{local or name or 'the model'} chose {why}"] if why else []
        for call, every in zip(calls, own, strict=False):
            call |= {name: every} if every else {}  # else it did not run for this microbatch
    return calls, untold[0] if untold else ""


def _own_calls(
    name: str, routes: Sequence[Route], made: Sequence[Contribution], parts: int
) -> tuple[Sequence[Sequence[Route]], str]:
    """What the router of this ``name`` chose, call by call; none where that is not like the reference's, and why."""
    calls: list[Sequence[Route]] = []
    counts = [len(one.choices.get(name, ())) for one in made]
    if len(routes) != sum(counts):
        times = f"{some(len(routes), 'time')} in {some(len(made), 'microbatch')}"
        return [], f"{times}, and the reference's {name or 'model'} {_times(counts)}"
    rest = iter(routes)
    for one, count in zip(made, counts, strict=True):
        own, due = [*islice(rest, count)], one.choices.get(name, ())
        unlike = next(filter(None, map(_unlike, own, due)), "")
        arranged = None if unlike else in_order(own, due, parts=parts)
        if arranged is None:
            return [], unlike or _UNORDERED
        calls.append(arranged)
    return calls, ""


def _times(counts: Sequence[int]) -> str:
    """How often a router chose in microbatches, in words."""
    return f"{some(counts[0], 'time')} in each" if len({*counts}) == 1 else f"{', '.join(map(str, counts))} times"


def _unlike(route: Route, choice: Choice) -> str:
    """What keeps a choice from being compared, in words; empty where nothing does."""
    seen_TK = route.chosen_TK
    if seen_TK.shape != choice.chosen_TK.shape:
        seen, due = (f"{k} for each of {t}" for t, k in (seen_TK.shape, choice.chosen_TK.shape))
        return f"{seen} tokens, and the reference {due}"
    largest, experts = int(seen_TK.max()), choice.scores_TE.shape[-1]
    return f"number {largest}, and the reference among {experts}" if largest >= experts else ""


def _order(calls: _Calls, share: Sequence[int], made: Sequence[Contribution]) -> Sequence[int]:
    """The microbatch of each of ``calls``: as they come, unless all routers say that they came in another order."""
    if not calls or all(_alike(call, made[m]) for call, m in zip(calls, share, strict=True)):
        return [*share][: len(calls)]
    off = [{m: _off(call, made[m]) for m in share} for call in calls]
    likest = [min((one[m], m != own, m) for m in share)[2] for one, own in zip(off, share, strict=True)]
    moved = [(one[m], one[own]) for one, m, own in zip(off, likest, share, strict=True) if m != own]
    clear = sorted(likest) == sorted(share) and all(other < LESS * own for other, own in moved)
    return likest if clear else share


def _off(call: Mapping[str, Sequence[Route]], made: Contribution) -> float:
    """How far off the scores of a microbatch must be, of the router of which they must be furthest."""
    pairs = [(routes, made.choices.get(name, ())) for name, routes in call.items()]
    if any(len(own) != len(due) or any(map(_unlike, own, due)) for own, due in pairs):
        return inf
    return max((short(route, one) for own, due in pairs for route, one in zip(own, due, strict=True)), default=0.0)


def _alike(call: Mapping[str, Sequence[Route]], made: Contribution) -> bool:
    """Whether the same is chosen for every token."""
    return all(
        bool(same_T(route.chosen_TK, choice.own_TK.cpu()).all())
        for name, routes in call.items()
        for route, choice in zip(routes, made.choices[name], strict=True)
    )
