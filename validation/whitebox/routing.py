"""Which experts the ranks chose, by the routers and the microbatches of the reference."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import inf

import torch
from torch import Tensor

from pipeproof.core.observe.observed import Routed
from pipeproof.core.observe.routes import Route, Routes
from pipeproof.core.routes import explained
from pipeproof.core.tolerance import Floor
from pipeproof.pipeline.sizes import some
from pipeproof.reference.choices import Choice, Choices, Chosen, of_experts, same_T
from pipeproof.reference.contribution import Contribution
from pipeproof.whitebox.assemble import Assembled
from pipeproof.whitebox.stages_in_order import PlacedStage

_UNSEEN = "no router was seen to choose, as where torch.compile or a kernel of its own does"
_UNORDERED = "for tokens in parts, whose order does not show"
_Calls = Sequence[Mapping[str, Sequence[Route]]]  # of a stage, by the reference's router


@dataclass(frozen=True)
class Routing:
    """What every rank's routers chose; ``reason``: why that of some is not compared, in words.

    ``wrong``: the routers, each with a microbatch, whose choices rounding does not explain.
    """

    ranks: Mapping[int, Mapping[Routed, Sequence[Route]]] = field(default_factory=dict)
    reason: str = ""
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

    def chosen(self, microbatches: int) -> tuple[dict[str, Chosen], ...]:
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
            not observed.equal(choice.chosen_TK.cpu())
            for one, told in zip(made, self.chosen(len(made)), strict=True)
            for name, every in told.items()
            for observed, choice in zip(every, one.choices[name], strict=True)
        )


UNROUTED = Routing()  # of ranks whose routers are not looked at


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
            yield bundle[0][0], join_routes(every), len(bundle)
        else:
            yield from ((rank, routes, 1) for rank, routes in bundle)


def _calls(observed: Routes, routers: Sequence[str], made: Sequence[Contribution], parts: int) -> tuple[_Calls, str]:
    """What a stage's routers chose, call by call; none where that is not like what was ``made``, and why in words."""
    if not observed:
        return [], _UNSEEN
    if len(observed) != len(routers):
        return [], f"{some(len(observed), 'router')} chose where the reference has {', '.join(routers)}"
    calls: list[dict[str, Sequence[Route]]] = [{} for _ in made]
    untold: list[str] = []
    for name, (local, routes) in zip(routers, observed.items(), strict=True):
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
        own, expected = [*islice(rest, count)], one.choices.get(name, ())
        unlike = next(filter(None, map(_unlike, own, expected)), "")
        arranged = None if unlike else in_own_order(own, expected, parts=parts)
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
        observed, expected = (f"{k} for each of {t}" for t, k in (seen_TK.shape, choice.chosen_TK.shape))
        return f"{observed} tokens, and the reference {expected}"
    largest, experts = int(seen_TK.max()), choice.scores_TE.shape[-1]
    return f"number {largest}, and the reference among {experts}" if largest >= experts else ""


def _order(calls: _Calls, share: Sequence[int], made: Sequence[Contribution]) -> Sequence[int]:
    """The microbatch of each of ``calls``: as they come, unless all routers say that they came in another order."""
    if not calls or all(_alike(call, made[m]) for call, m in zip(calls, share, strict=True)):
        return [*share][: len(calls)]
    off = [{m: _off(call, made[m]) for m in share} for call in calls]
    likest = [min((one[m], m != own, m) for m in share)[2] for one, own in zip(off, share, strict=True)]
    moved = [(one[m], one[own]) for one, m, own in zip(off, likest, share, strict=True) if m != own]
    clear = sorted(likest) == sorted(share) and all(other < _LESS * own for other, own in moved)
    return likest if clear else share


def _off(call: Mapping[str, Sequence[Route]], made: Contribution) -> float:
    """How far off the scores of a microbatch must be, of the router of which they must be furthest."""
    pairs = [(routes, made.choices.get(name, ())) for name, routes in call.items()]
    if any(len(own) != len(expected) or any(map(_unlike, own, expected)) for own, expected in pairs):
        return inf
    return max(
        (shortfall(route, one) for own, expected in pairs for route, one in zip(own, expected, strict=True)),
        default=0.0,
    )


def _alike(call: Mapping[str, Sequence[Route]], made: Contribution) -> bool:
    """Whether the same is chosen for every token."""
    return all(
        bool(same_T(route.chosen_TK, choice.own_TK.cpu()).all())
        for name, routes in call.items()
        for route, choice in zip(routes, made.choices[name], strict=True)
    )


_LESS = 0.1  # of what scores must be off in another order: where all are nearly equal no order shows
_UNITS = 4
_MOST = 0.75  # of all tokens: in an order that is not theirs so many do not go where they should


def join_routes(parts: Sequence[Routes]) -> Routes:
    """What the routers of ranks chose that have a part of the tokens each, one part after another."""
    first, *_ = parts
    every = [[*routes.values()] for routes in parts]
    return {
        name: [Route(torch.cat([one.chosen_TK for one in row]), row[0].dtype) for row in zip(*routes, strict=True)]
        for name, routes in zip(first, zip(*every, strict=True), strict=True)
    }


def in_own_order(routes: Sequence[Route], expected: Sequence[Choice], *, parts: int = 1) -> Sequence[Route] | None:
    """``routes`` of one call, which has the tokens in so many ``parts``, in the order of the reference's tokens.

    Where the order does not show, whole ones are as they are, and parts are None.
    """
    experts = of_experts(expected)
    if not experts or (alike := _in_place(routes, expected, experts[-1])) == 1.0:
        return routes
    if parts > 1 and not all(choice.of_tokens for choice in expected):
        return None  # an expert that chooses tokens does so among those of a part
    best, off = routes, shortfall(routes[experts[-1]], expected[experts[-1]])
    tokens = len(expected[experts[-1]].own_TK)
    for order_T in _orders(tokens, parts):
        other = [_moved(route, choice, order_T) for route, choice in zip(routes, expected, strict=True)]
        share = _in_place(other, expected, experts[-1])
        if share > max(alike, _MOST) and shortfall(other[experts[-1]], expected[experts[-1]]) < _LESS * off:
            best, alike = other, share
    return None if parts > 1 and alike <= _MOST else best


def _in_place(routes: Sequence[Route], expected: Sequence[Choice], which: int) -> float:
    """The part of tokens that go where they go in the reference."""
    return float(same_T(routes[which].chosen_TK, expected[which].own_TK.cpu()).double().mean())


def shortfall(route: Route, choice: Choice) -> float:
    """How far off scores must be for tokens to go there, on average, relative to the largest score.

    In an order that is not theirs that is very far; what a few units of its last place do is none.
    """
    finite = choice.scores_TE[choice.scores_TE.isfinite()].double()
    largest = max(finite.abs().max().item() if len(finite) else 0.0, sys.float_info.min)
    off = choice.short_T(route.chosen_TK.to(choice.scores_TE.device)).mean().item()
    unit = torch.finfo(route.dtype).eps if route.dtype.is_floating_point else 0.0
    return off / largest if off > _UNITS * unit * largest else 0.0


def _orders(tokens: int, parts: int) -> Iterator[Tensor]:
    """For each order in which they may be, where in it the reference's tokens are."""
    every_T = torch.arange(tokens)
    for rows in (count for count in range(2, tokens) if tokens % count == 0):
        yield every_T.view(-1, rows).T.flatten()  # tokens by their place in a sequence, and then by row
    for rows in (count for count in range(2, tokens // parts + 1) if tokens // parts % count == 0 and parts > 1):
        yield every_T.view(parts, rows, -1).transpose(0, 1).flatten()  # each rank's part of all rows


def _moved(route: Route, choice: Choice, order_T: Tensor) -> Route:
    """``route`` in the reference's order of tokens, which are chosen for, or chosen."""
    chosen_TK = route.chosen_TK
    if not choice.of_tokens:
        return Route(order_T.argsort()[chosen_TK], route.dtype) if len(order_T) > int(chosen_TK.max()) else route
    if len(chosen_TK) % len(order_T):
        return route
    return Route(chosen_TK.view(len(order_T), -1, chosen_TK.shape[-1])[order_T].flatten(0, 1), route.dtype)
