"""Every specimen, in its smallest case, held against itself: caught, but for what a chain of links cannot show."""

import pytest
from composed_reach import HANGS, OUT_OF_REACH, SEEN_AS

from pipeproof.own.faults import pass_on
from pipeproof.wings.composed import validate_composed
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.wings.specimens.trial import smallest_of
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World
from tests.support.sweeps import sampled


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sampled(SPECIMENS, 2))
def test_a_planted_fault_breaks_a_link(name: str, simulated: World) -> None:
    specimen = SPECIMENS[name]
    case = smallest_of(specimen)
    if name in HANGS:
        with pytest.raises(RankFailed):
            validate_composed(case, simulated)
        return
    verdict = validate_composed(case, simulated)
    if name in OUT_OF_REACH:
        assert verdict.outcome == "pass", f"{OUT_OF_REACH[name]}: {verdict}"
        return
    assert verdict.outcome == "fail", str(verdict)
    planted = specimen.cause(case)
    kinds = {planted.kind, *specimen.fault.alike, SEEN_AS.get(name, planted.kind)}
    if verdict.causes and specimen.reorder is pass_on:  # the first cause, or what else would explain it
        first = (verdict.causes[0], *(other[0] for other in verdict.alternatives))
        assert kinds & {one.kind for cause in first for one in (cause, *cause.instead)}, str(verdict)
    else:
        assert verdict.causes or verdict.undecided, str(verdict)


def test_what_is_out_of_reach_is_a_specimen() -> None:
    assert {*OUT_OF_REACH, *SEEN_AS, *HANGS} <= SPECIMENS.keys()
