"""What ``routers=`` might tell of a step that fails without it: where rounding may have sent tokens elsewhere.

Or of one that fails with it, where a router is not among those that it names.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeproof.judging.tolerance import precision_among
from pipeproof.pipeline.sizes import some
from pipeproof.reference.choices import Choice, Choosing
from pipeproof.reference.data import Batch


def unrouted(model: nn.Module, batches: Sequence[Batch]) -> str:
    """The module of ``model`` that has most tokens with hardly any distance between what is chosen and what is not.

    But for those that are named. In words; empty where none has any. That is what rounding may always do to scores, so
    a step may choose otherwise.
    """
    names = {module: name for name, module in model.named_modules()}
    near, tokens = Counter[str](), Counter[str]()
    routers = next((batch.routers for batch in batches), None)
    named = {} if routers is None else routers.among(model)
    allowed = 2 * precision_among(model.parameters()).least  # one score may be less, and the other more

    def look(running: Sequence[nn.Module], own: Choice) -> Tensor:
        name = next((names[one] for one in reversed(running) if one in names), "")
        known = any(one in named for one in running)
        if name and not known and own.of_tokens and own.own_TK.shape[-1] < own.scores_TE.shape[-1]:
            tokens[name] += len(own.own_TK)
            near[name] += int((_distance_T(own) <= allowed).sum())
        return own.own_TK

    with torch.no_grad(), Choosing(look):
        for batch in batches:
            model(*batch.inputs)
    name, count = next(iter(near.most_common(1)), ("", 0))
    if not count:
        return ""
    scores = f"{some(count, 'token')} of {tokens[name]:,} in {name} have scores as near as rounding may put them"
    return f"{scores}: routers={name!r} tells which of them the step sent elsewhere"


def _distance_T(own: Choice) -> Tensor:
    """How far the least that is chosen is above the largest that is not, relative to the largest score of all."""
    scores_TE = own.scores_TE.double()
    best_TK = scores_TE.topk(own.own_TK.shape[-1] + 1).values
    return (best_TK[:, -2] - best_TK[:, -1]) / scores_TE[scores_TE.isfinite()].abs().amax().clamp(min=1e-300)
