"""The order in which ranks have the tokens of a microbatch: rows first or sequences first, whole or in parts.

It is told by where the tokens go, as the reference sends them: nobody has to say it.
"""

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipeproof.observers.routes import Route, Routes
from pipeproof.reference.choices import Choice, of_experts, same_T

LESS = 0.1  # of what scores must be off in another order: where all are nearly equal no order shows
_UNITS = 4
_MOST = 0.75  # of all tokens: in an order that is not theirs so many do not go where they should


def joined(parts: Sequence[Routes]) -> Routes:
    """What the routers of ranks chose that have a part of the tokens each, one part after another."""
    first, *_ = parts
    every = [[*routes.values()] for routes in parts]
    return {
        name: [Route(torch.cat([one.chosen_TK for one in row]), row[0].dtype) for row in zip(*routes, strict=True)]
        for name, routes in zip(first, zip(*every, strict=True), strict=True)
    }


def in_order(routes: Sequence[Route], due: Sequence[Choice], *, parts: int = 1) -> Sequence[Route] | None:
    """``routes`` of one call, which has the tokens in so many ``parts``, in the order of the reference's tokens.

    Where the order does not show, whole ones are as they are, and parts are None.
    """
    experts = of_experts(due)
    if not experts or (alike := _alike(routes, due, experts[-1])) == 1.0:
        return routes
    if parts > 1 and not all(choice.of_tokens for choice in due):
        return None  # an expert that chooses tokens does so among those of a part
    best, off = routes, short(routes[experts[-1]], due[experts[-1]])
    tokens = len(due[experts[-1]].own_TK)
    for order_T in _orders(tokens, parts):
        other = [_moved(route, choice, order_T) for route, choice in zip(routes, due, strict=True)]
        share = _alike(other, due, experts[-1])
        if share > max(alike, _MOST) and short(other[experts[-1]], due[experts[-1]]) < LESS * off:
            best, alike = other, share
    return None if parts > 1 and alike <= _MOST else best


def _alike(routes: Sequence[Route], due: Sequence[Choice], which: int) -> float:
    """The part of tokens that go where they go in the reference."""
    return float(same_T(routes[which].chosen_TK, due[which].own_TK.cpu()).double().mean())


def short(route: Route, choice: Choice) -> float:
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
