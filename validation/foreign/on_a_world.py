"""What users call who have no world of their own: each opens one for as long as it lasts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.core.verdict import Verdict
from pipeproof.foreign.expectation import Expectation
from pipeproof.foreign.optimizing import MakesOptimizer
from pipeproof.foreign.rank import Step
from pipeproof.foreign.validator import WhiteBox
from pipeproof.worlds.kinds import REAL
from pipeproof.worlds.world import World


def validate(
    step: Step,
    *,
    reference: Callable[[], nn.Module] | Expectation,
    microbatches: Sequence[Any],
    ranks: int | Sequence[int] | Mapping[str, int],
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None,
    optimizer: MakesOptimizer | None = None,
    contract: Contract = DEFAULTS,
    timeout_s: float | None = None,
    world: str = REAL,
    **words: Any,
) -> Verdict:
    """As ``WhiteBox.validate``, on a world that lasts as long as this call.

    ``world``: ``real``, or ``simulated``, which finds races and hangs that real ranks show once in a thousand runs: one
    interleaving, with gloo's rules. A ``World`` of one's own has others, or all, and ``WhiteBox`` takes it.
    """
    with World(kind=world) as place:
        return WhiteBox(place).validate(
            step,
            reference=reference,
            microbatches=microbatches,
            ranks=ranks,
            loss_fn=loss_fn,
            optimizer=optimizer,
            contract=contract.with_words(words),
            timeout_s=timeout_s,
        )
