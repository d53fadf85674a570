"""Ranks' expert choices, by reference router and microbatch."""

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
from pipeproof.core.routes import explain_choices
from pipeproof.core.tolerance import Floor
from pipeproof.pipeline.sizes import some
from pipeproof.reference.choices import Choice, Choices, Chosen, of_experts, same_T
from pipeproof.reference.contribution import Contribution
from pipeproof.whitebox.assemble import Assembled
from pipeproof.whitebox.stages_in_order import PlacedStage

_UNSEEN = "no router was observed to choose, as where torch.compile or a kernel of its own does"
_UNORDERED = "for tokens in parts, whose order does not show"
_Calls = Sequence[Mapping[str, Sequence[Route]]]  # of a stage, by reference router


@dataclass(frozen=True)
class Routing:
    """Router choices by rank; ``reason``: why some stay uncompared.

    wrong: (router, microbatch) pairs whose choices rounding does not explain.
    """

    ranks: Mapping[int, Mapping[Routed, Sequence[Route]]] = field(default_factory=dict)
    reason: str = ""
    wrong: Collection[tuple[str, int]] = frozenset()

    @staticmethod
    def of(found: Assembled, made: Sequence[Contribution]) -> "Routing":
        """Collect choices from ``found``; ``made``: the reference's contributions."""
        ranks: dict[int, dict[Routed, Sequence[Route]]] = {}
        untold: list[str] = []
        every = {name: choices for one in reversed(made) for name, choices in one.choices.items()}
        stages: dict[str, int | None] = {}  # that own a router's parameters, or its neighbours'
        for name in every:
            within = [".".join(name.split(".")[:k]) for k in range(name.count(".") + 1, 0, -1)] if name else []
            held = (stage for one in within for of, stage in found.owner.items() if of.startswith(f"{one}."))
            stages[name] = next(held, next(iter(found.owner.values()), None))
        for stage in found.stages:
            routers = [name for name in every if stages[name] == stage.index]
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
        """Mark unexplained choices as ``wrong``, and drop later ones in the same microbatch: they follow.

        made: from a reference that follows the ranks. floor: score floor by microbatch, router and choice.
        """
        wrong, kept = set[tuple[str, int]](), set[tuple[str, int]]()
        for m, (one, chosen) in enumerate(zip(made, self._first(len(made)), strict=True)):
            for name, choices in one.choices.items():
                kept.add((name, m))
                pairs = enumerate(zip(chosen.get(name, ()), choices, strict=False))
                if not all(explain_choices(route, choice, partial(floor, m, name, n)) for n, (route, choice) in pairs):
                    wrong.add((name, m))
                    break
        ranks = {
            rank: {at: every for at, every in routes.items() if (at.router, at.microbatch) in kept}
            for rank, routes in self.ranks.items()
        }
        return replace(self, ranks=ranks, wrong=wrong)

    def choices(self, microbatches: int) -> tuple[dict[str, Chosen], ...]:
        """Return each microbatch's choices by router, from the first rank, without ``wrong`` ones."""
        return tuple(
            {name: [one.chosen_TK for one in every] for name, every in routes.items() if (name, m) not in self.wrong}
            for m, routes in enumerate(self._first(microbatches))
        )

    def _first(self, microbatches: int) -> tuple[dict[str, Sequence[Route]], ...]:
        """Return each microbatch's routes by router, from the first rank."""
        found: tuple[dict[str, Sequence[Route]], ...] = tuple({} for _ in range(microbatches))
        for routes in (self.ranks[rank] for rank in sorted(self.ranks)):
            for at, every in routes.items():
                found[at.microbatch].setdefault(at.router, every)
        return found

    def differs(self, made: Sequence[Contribution]) -> bool:
        """True if any router chose otherwise than in ``made``."""
        return any(
            not observed.equal(choice.chosen_TK.cpu())
            for one, chosen in zip(made, self.choices(len(made)), strict=True)
            for name, every in chosen.items()
            for observed, choice in zip(every, one.choices[name], strict=True)
        )


UNROUTED = Routing()  # for ranks without observed routers


def _bundles(
    stage: PlacedStage, found: Assembled, choices: Choices, routers: Sequence[str]
) -> Iterator[tuple[int, Routes, int]]:
    """Yield a stage's routes rank by rank; ranks that split tokens are joined on the first.

    Each comes with its number of parts.
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
    """Return a stage's routes call by call; empty with a reason if they do not fit ``made``."""
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
            call |= {name: every} if every else {}  # otherwise it skipped this microbatch
    return calls, untold[0] if untold else ""


def _own_calls(
    name: str, routes: Sequence[Route], made: Sequence[Contribution], parts: int
) -> tuple[Sequence[Sequence[Route]], str]:
    """Return a router's routes call by call; empty with a reason if they do not fit the reference's."""
    calls: list[Sequence[Route]] = []
    counts = [len(one.choices.get(name, ())) for one in made]
    if len(routes) != sum(counts):
        each = f"{some(counts[0], 'time')} in each" if len({*counts}) == 1 else f"{', '.join(map(str, counts))} times"
        times = f"{some(len(routes), 'time')} in {some(len(made), 'microbatch')}"
        return [], f"{times}, and the reference's {name or 'model'} {each}"
    rest = iter(routes)
    for one, count in zip(made, counts, strict=True):
        own, expected = [*islice(rest, count)], one.choices.get(name, ())
        unlike = next(filter(None, map(_unlike, own, expected)), "")
        arranged = None if unlike else in_own_order(own, expected, parts=parts)
        if arranged is None:
            return [], unlike or _UNORDERED
        calls.append(arranged)
    return calls, ""


def _unlike(route: Route, choice: Choice) -> str:
    """Return why a choice cannot be compared; empty if it can."""
    observed_TK = route.chosen_TK
    if observed_TK.shape != choice.chosen_TK.shape:
        observed, expected = (f"{k} for each of {t}" for t, k in (observed_TK.shape, choice.chosen_TK.shape))
        return f"{observed} tokens, and the reference {expected}"
    largest, experts = int(observed_TK.max()), choice.scores_TE.shape[-1]
    return f"number {largest}, and the reference among {experts}" if largest >= experts else ""


def _order(calls: _Calls, share: Sequence[int], made: Sequence[Contribution]) -> Sequence[int]:
    """Return each call's microbatch: in order, unless all routers show another one."""
    if not calls:
        return []
    pairs = [
        (route.chosen_TK, choice)
        for call, m in zip(calls, share, strict=True)
        for name, routes in call.items()
        for route, choice in zip(routes, made[m].choices[name], strict=True)
    ]
    if all(bool(same_T(chosen_TK, choice.own_TK.cpu()).all()) for chosen_TK, choice in pairs):
        return share  # all tokens have the reference's experts
    off = [{m: _off(call, made[m]) for m in share} for call in calls]
    likest = [min((one[m], m != own, m) for m in share)[2] for one, own in zip(off, share, strict=True)]
    moved = [(one[m], one[own]) for one, m, own in zip(off, likest, share, strict=True) if m != own]
    clear = sorted(likest) == sorted(share) and all(other < _LESS * own for other, own in moved)
    return likest if clear else share


def _off(call: Mapping[str, Sequence[Route]], made: Contribution) -> float:
    """Return the largest score error that the routes imply, over a microbatch's routers."""
    pairs = [(routes, made.choices.get(name, ())) for name, routes in call.items()]
    if any(len(own) != len(expected) or any(map(_unlike, own, expected)) for own, expected in pairs):
        return inf
    every = (shortfall(route, one) for own, expected in pairs for route, one in zip(own, expected, strict=True))
    return max(every, default=0.0)


_LESS = 0.1  # required score gain from another order: nearly equal tokens show no order
_UNITS = 4
_MOST = 0.75  # share of tokens: in a wrong order, more go elsewhere


def join_routes(parts: Sequence[Routes]) -> Routes:
    """Concatenate routes from ranks that split the tokens."""
    first, *_ = parts
    every = [[*routes.values()] for routes in parts]
    return {
        name: [Route(torch.cat([one.chosen_TK for one in row]), row[0].dtype) for row in zip(*routes, strict=True)]
        for name, routes in zip(first, zip(*every, strict=True), strict=True)
    }


def in_own_order(routes: Sequence[Route], expected: Sequence[Choice], *, parts: int = 1) -> Sequence[Route] | None:
    """Reorder one call's ``routes``, in ``parts`` token parts, to the reference's tokens.

    If no order shows, whole routes stay, and split ones are None.
    """
    experts = of_experts(expected)
    if not experts or (alike := _in_place(routes, expected, experts[-1])) == 1.0:
        return routes
    if parts > 1 and not all(choice.of_tokens for choice in expected):
        return None  # experts that choose tokens choose within a part
    best, off = routes, shortfall(routes[experts[-1]], expected[experts[-1]])
    tokens = len(expected[experts[-1]].own_TK)
    for order_T in _orders(tokens, parts):
        other = [_reorder(route, choice, order_T) for route, choice in zip(routes, expected, strict=True)]
        share = _in_place(other, expected, experts[-1])
        if share > max(alike, _MOST) and shortfall(other[experts[-1]], expected[experts[-1]]) < _LESS * off:
            best, alike = other, share
    return None if parts > 1 and alike <= _MOST else best


def _in_place(routes: Sequence[Route], expected: Sequence[Choice], which: int) -> float:
    """Return the share of tokens with the reference's experts."""
    return float(same_T(routes[which].chosen_TK, expected[which].own_TK.cpu()).double().mean())


def shortfall(route: Route, choice: Choice) -> float:
    """Return the mean score error that the routes imply, relative to the largest score.

    A wrong order makes it very large; a few units in the last place count as none.
    """
    finite = choice.scores_TE[choice.scores_TE.isfinite()].double()
    largest = max(finite.abs().max().item() if len(finite) else 0.0, sys.float_info.min)
    off = choice.short_T(route.chosen_TK.to(choice.scores_TE.device)).mean().item()
    unit = torch.finfo(route.dtype).eps if route.dtype.is_floating_point else 0.0
    return off / largest if off > _UNITS * unit * largest else 0.0


def _orders(tokens: int, parts: int) -> Iterator[Tensor]:
    """Yield possible token orders, as the reference tokens' positions."""
    every_T = torch.arange(tokens)
    for rows in (count for count in range(2, tokens) if tokens % count == 0):
        yield every_T.view(-1, rows).T.flatten()  # by position, then row
    for rows in (count for count in range(2, tokens // parts + 1) if tokens // parts % count == 0 and parts > 1):
        yield every_T.view(parts, rows, -1).transpose(0, 1).flatten()  # each rank has a part of all rows


def _reorder(route: Route, choice: Choice, order_T: Tensor) -> Route:
    """Reorder ``route`` to the reference's tokens, whether tokens choose or are chosen."""
    chosen_TK = route.chosen_TK
    if not choice.of_tokens:
        return Route(order_T.argsort()[chosen_TK], route.dtype) if len(order_T) > int(chosen_TK.max()) else route
    if len(chosen_TK) % len(order_T):
        return route
    return Route(chosen_TK.view(len(order_T), -1, chosen_TK.shape[-1])[order_T].flatten(0, 1), route.dtype)
