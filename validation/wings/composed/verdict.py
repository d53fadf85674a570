"""The one verdict that follows from what all ranks saw of a step and made of it again."""

from collections.abc import Sequence
from dataclasses import replace

from pipeproof.core.judge import concluded
from pipeproof.core.ledger import Ledger
from pipeproof.core.verdict import Verdict
from pipeproof.wings.composed.sums import not_summed
from pipeproof.wings.composed.weights import enter_weights
from pipeproof.wings.composed.whole import LAWS, OwnPart, Whole

OF_REPLICAS = (LAWS[0], "initial-weights", *LAWS[1:])  # ranks that have the same begin with the same
AS_IT_CAME = "by what stages received, right or wrong"
_OF_WHAT_CAME = ("loss", "presence", "gradient", "grad-norm", "updated-parameters")


def verdict_of(
    ranks: Sequence[OwnPart],
    wholes: Sequence[Whole],
    *,
    replicas: Sequence[int],
    title: str,
    rerun: str,
    seconds: float,
) -> Verdict:
    """The verdict on a step of all ``ranks``, with its causes.

    ``wholes``: the lines of ranks that have all stages. ``replicas``: the number of the one that each rank works on, of
    which several lines may be parts.
    """
    laws = LAWS if len(wholes) == 1 else OF_REPLICAS
    ledger = Ledger(laws)
    for whole in wholes:
        for part in reversed(whole.parts):
            ledger.join(part.ledger)
    apart = enter_weights(ledger, [part.weights for part in ranks]) if len(wholes) > 1 else []
    wholes = _along_the_flow(_knowing_all(wholes), replicas)
    for whole in wholes:
        whole.enter(ledger)
    if any(mismatch.law in ("microbatches", "boundaries") for mismatch in ledger.mismatches):
        for law in _OF_WHAT_CAME:
            ledger.remark(law, AS_IT_CAME)
    _miss_unreported(ledger, wholes)
    ledger.mismatches.sort(key=lambda one: laws.index(one.law))
    verdict = concluded(ledger, title, otherwise=wholes[0].precision, rerun=rerun, seconds=seconds)
    first = next((one for one in wholes if one.is_wrong(verdict)), wholes[0])
    verdict = first.explained(verdict)
    summed = () if verdict.cause else tuple(not_summed([part.wrong for part in ranks], replicas))
    causes = tuple(dict.fromkeys((*apart, *summed, *verdict.cause)))
    return replace(verdict, cause=causes, undecided=() if summed else verdict.undecided)


def _along_the_flow(wholes: Sequence[Whole], replicas: Sequence[int]) -> list[Whole]:
    """``wholes``; of those that are parts of one replica, first the one whose flow was wrong first.

    What their ranks compute, they compute together: so one that is given what is right gives what is wrong, too.
    """

    def at(whole: Whole) -> tuple[int, tuple[bool, int, bool]]:
        of = next((rank for rank, part in enumerate(whole.parts) if part.stages), 0)
        return replicas[of], whole.first_wrong

    return sorted(wholes, key=at) if len({*replicas}) < len(wholes) else list(wholes)


def _knowing_all(wholes: Sequence[Whole]) -> list[Whole]:
    """``wholes``, each with the losses that any of its ranks may report: of all together, and their mean."""
    total = sum(whole.loss * whole.divisor for whole in wholes) / sum(whole.divisor for whole in wholes)
    mean = sum(whole.loss for whole in wholes) / len(wholes)
    return [replace(whole, everybodys=(total, mean)) for whole in wholes]


def _miss_unreported(ledger: Ledger, wholes: Sequence[Whole]) -> None:
    reported, only = [one for whole in wholes for one in whole.reported], wholes[0].only
    told = any(one.losses is not None or one.loss is not None for one in reported)
    if not told and only in (None, wholes[0].chain.last):
        ledger.miss("loss", "the job reports none")
    if only is None and all(one.norm is None for one in reported):
        ledger.miss("grad-norm", wholes[0].no_norm or "the job reports none")
