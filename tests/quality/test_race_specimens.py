"""Races that simulated ranks alone show: each is named under some seed of twenty, and no right code is."""

import re

import pytest

from pipeproof.core.cause import RACES
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.own.validator import crash_verdict, validate
from pipeproof.pipeline.transports import Transport
from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.wings.specimens import IN_SIMULATION, SIMULATED_CONTROLS
from pipeproof.wings.specimens.trial import search, smallest_of
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sweeps import SWEEP

SEEDS = range(20)
SHOWN = [(name, transport) for name, one in IN_SIMULATION.items() for transport in one.needs.transports]


def ids(values: object) -> str:
    return values.value if isinstance(values, Transport) else str(values)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "transport"), SHOWN, ids=ids)
def test_a_race_is_caught_and_named_with_its_place_and_lines(
    name: str, transport: Transport, simulated: SimulatedWorld
) -> None:
    one, simulated.transport, simulated.seeds = IN_SIMULATION[name], transport, SEEDS
    found = search(smallest_of(one), simulated)
    assert found.caught, found
    assert found.recorded is not None, "what is caught is diagnosed"
    assert found.recorded.located, found
    if one.law in RACES:  # under the seed that is left in the world
        (cause,) = verdict_on(smallest_of(one), simulated).causes
        assert cause.lines, "the lines of who planted it are told, as a user's are"
        assert all("specimens/" in each.line.file for each in cause.lines)
        assert f"rank {cause.rank}" in cause.detail


def verdict_on(case: Case, world: World) -> Verdict:
    try:
        return validate(case, world)
    except RankFailed as failure:
        return crash_verdict(case, failure)


@pytest.mark.parametrize("name", [name for name, one in IN_SIMULATION.items() if one.law == "deadlock"])
def test_a_deadlock_is_told_with_who_waits_and_the_lines(name: str, simulated: SimulatedWorld) -> None:
    one = IN_SIMULATION[name]
    for simulated.transport in one.needs.transports:
        verdict = verdict_on(smallest_of(one), simulated)
        assert verdict.ended == "hang", str(verdict)
        golden(verdict.headline)
        places = re.findall(r"^rank (\d): can never go on at (\w+)\.py:", verdict.failure, re.MULTILINE)
        expected = (
            {"1"} if name == "barrier-of-some" else {"0", "1"}
        )  # the first rank is in the runtime, and not in a line
        assert {rank for rank, _ in places} == expected, verdict.failure


@pytest.mark.long
@pytest.mark.parametrize("name", SIMULATED_CONTROLS)
def test_right_code_is_right_in_every_interleaving_that_differs(name: str, simulated: SimulatedWorld) -> None:
    one = SIMULATED_CONTROLS[name]
    simulated.most = 100
    for simulated.transport in one.needs.transports:
        for _ in simulated.interleavings():
            verdict = verdict_on(Case.parse(f"{one.smallest} specimen={name}"), simulated)
            assert verdict.outcome == "pass", str(verdict)
    assert all(one.complete and not (one.more or one.astray) for one in simulated.explorations)


def test_each_needs_its_transport_and_no_more() -> None:
    assert len({one.summary for one in IN_SIMULATION.values()}) == len(IN_SIMULATION)
    wanted = set[str]()
    for name, one in {**IN_SIMULATION, **SIMULATED_CONTROLS}.items():
        case = Case.parse(one.smallest)
        assert one.missing(case, one.needs.transports[0]) == "", name
        wanted.add(one.missing(case))
    golden("\n".join(sorted(wanted)))


FIRST = {one.family: name for name, one in reversed(IN_SIMULATION.items())}.values()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FIRST else SWEEP) for n in IN_SIMULATION])
def test_on_real_ranks_nothing_is_planted(name: str, world: World) -> None:
    assert validate(smallest_of(IN_SIMULATION[name]), world, explain=False).outcome == "pass"
