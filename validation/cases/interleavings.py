"""The interleaving of a failing case with as few preemptions as it takes."""

from pipeproof.cases.case import Case
from pipeproof.cases.validator import crashed, validate
from pipeproof.worlds.preemptions import fewest
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World


def narrow(case: Case, world: World) -> None:
    """Leave in ``world``, which is simulated, the fewest preemptions under which ``case`` ends as it does now."""
    ended = _ending(case, world)
    fewest(world, lambda: _ending(case, world) == ended)


def _ending(case: Case, world: World) -> tuple[str, ...]:
    try:
        verdict = validate(case, world, explain=False)
    except RankFailed as failure:
        verdict = crashed(case, failure)
    return verdict.verdict, verdict.ended, *(cause.kind for cause in verdict.cause)
