"""What gradients are made of, in symbols: proven for what is right, and told for what is not."""

from collections.abc import Callable

import pytest
from hypothesis import given

from pipeproof.pipeline.action import Action
from pipeproof.pipeline.columns import Columns
from pipeproof.pipeline.program import Program, lower
from pipeproof.pipeline.program_laws import violations
from pipeproof.pipeline.schedules import FAMILIES, build, virtuals
from pipeproof.pipeline.symbolic import terms, wrong_terms
from tests.support.golden import golden
from tests.support.programs import programs

Change = Callable[[list[list[Action]]], None]
BOTH = pytest.mark.parametrize("by_name", [True, False], ids=["by_name", "in_order"])


def program(name: str = "gpipe", ranks: int = 2, microbatches: int = 2, change: Change | None = None) -> Program:
    good = lower(build(name, ranks=ranks, virtual=virtuals(name, looped=2), microbatches=microbatches))
    rows = [list(row) for row in good.ranks]
    if change is not None:
        change(rows)
    return Program(good.schedule, Columns.of(rows))


def swapped(rank: int, *pair: str) -> Change:
    def change(rows: list[list[Action]]) -> None:
        here, there = (rows[rank].index(Action.parse(one)) for one in pair)
        rows[rank][here], rows[rank][there] = rows[rank][there], rows[rank][here]

    return change


def without(rank: int, action: str) -> Change:
    return lambda rows: rows[rank].remove(Action.parse(action))


def twice(rank: int, action: str) -> Change:
    return lambda rows: rows[rank].append(Action.parse(action))


def told(found: Program, *, by_name: bool) -> list[str]:
    return [violation.message for violation in wrong_terms(found, terms(found, by_name=by_name))]


@BOTH
@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_is_proven(name: str, by_name: bool) -> None:
    for ranks, microbatches in ((1, 2), (2, 4), (3, 6), (4, 9)):
        found = terms(program(name, ranks, microbatches), by_name=by_name)
        assert found.proven
        assert len(found.entries) == found.stages * microbatches


WRONG = {  # programs with wrong terms; the first two are proven where messages go by name
    "a message in another's place": program(change=swapped(1, "1SEND_B0", "1SEND_B1")),
    "an activation in another's place": program(change=swapped(0, "0SEND_F0", "0SEND_F1")),
    "a backward twice": program("1f1b", change=twice(1, "1B1")),
    "a backward never": program("naive", 2, 1, without(1, "1B0")),
    "a weight's backward without its input's": program("zb-h1", 2, 2, without(1, "1I1")),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_terms_are_told(name: str) -> None:
    golden("\n".join(told(WRONG[name], by_name=False)))
    by_name = told(WRONG[name], by_name=True)
    assert by_name == ([] if "another's place" in name else told(WRONG[name], by_name=False))


def test_of_many_wrong_terms_a_few_are_told_and_the_rest_counted() -> None:
    def change(rows: list[list[Action]]) -> None:
        sends = [k for k, one in enumerate(rows[0]) if str(one).startswith("0SEND_F")]
        for k, other in zip(sends, reversed([rows[0][one] for one in sends]), strict=True):
            rows[0][k] = other

    found = told(program(microbatches=16, change=change), by_name=False)
    assert len(found) == 2 * 5 + 1
    assert found[-1] == "and 54 more"


def test_mixtures_of_mixtures_stay_short() -> None:
    found = told(program("gpipe", 6, 3, swapped(0, "0SEND_F0", "0SEND_F1")), by_name=False)
    assert max(map(len, found)) < 400


@pytest.mark.long
@given(found=programs())
def test_what_breaks_no_law_is_proven(found: Program) -> None:
    laws = {violation.law for violation in violations(found)} - {"deadlock"}
    if not laws:
        assert terms(found, by_name=True).proven
        assert terms(found, by_name=False).proven
    if "channel-order" not in laws and terms(found, by_name=True).proven:
        assert terms(found, by_name=False).proven
