"""Part j: fuzz cases per second on simulated ranks, against kept real ranks; and whether the verdicts are the same."""

import time

from bench_cases import drawn
from bench_table import Row, Target, ratio

from pipeproof import Case, SimulatedWorld, Verdict, World
from pipeproof.own.observe import observe
from pipeproof.own.validator import validate

_LEAST = 10.0


def measure(*, ranks: int, rounds: int) -> list[Row]:
    """Cases per second of the same cases in both worlds, as a whole and of the ranks' part alone.

    ``ranks``: how many the cases have. A round is one case. Raises ``AssertionError`` where verdicts differ.
    """
    whole: dict[str, list[float]] = {"real": [], "simulated": []}
    part: dict[str, list[float]] = {"real": [], "simulated": []}
    with World() as real, SimulatedWorld() as simulated:
        cases = drawn(ranks, rounds)
        worlds = {"real": real, "simulated": simulated}
        for world in worlds.values():
            validate(cases[0], world)  # the first pool starts the fork server
        for case in cases:
            verdicts = {name: _validated(case, world, whole[name]) for name, world in worlds.items()}
            assert verdicts["real"] == verdicts["simulated"], f"{case} has another verdict on simulated ranks"
            for name, world in worlds.items():
                began = time.perf_counter()
                observe(case, world)
                part[name].append(time.perf_counter() - began)
    return [_row("validated", whole, rounds), _row("the ranks' part", part, rounds)]


def _validated(case: Case, world: World, times: list[float]) -> Verdict:
    began = time.perf_counter()
    verdict = validate(case, world)
    times.append(time.perf_counter() - began)
    return verdict


def _row(name: str, times: dict[str, list[float]], rounds: int) -> Row:
    speeds = {f"{world} ranks": rounds / sum(took) for world, took in times.items()}
    return Row(name, speeds, [Target("times as fast", ratio(times["real"], times["simulated"]), _LEAST, least=True)])
