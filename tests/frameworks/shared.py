"""Tests that each framework's file has, of the tables and of the step that are its own.

A file takes a pair of them as its own, and has what they name: ``judged``, ``step`` and ``FAULTS`` of its engine,
``job_of`` of its jobs, and these tables.

LAYOUTS: by the tier to which they pass, layouts by name, each with a number of microbatches if not the usual one.
LAWS: those that hold of some layouts alone, with what says of a layout whether they do. RIGHT: layouts of jobs, each
with its tier. ITSELF: of these, those that are held against themselves, each with a tier or None. ITSELF_LAWS: what
holds then. NAMED, BY_ITSELF: causes by fault, in the fault's own layout, or in another: groups of layout and causes.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from pipeproof import World
from pipeproof.whitebox import WhiteBox
from tests.frameworks.fault import named, passed
from tests.frameworks.jobs import Cause, assert_named, assert_right

PARAMETERS = {"laid_out", "fault", "right", "itself", "fault_in_a_job", "fault_by_itself"}


def cases(own: Any, name: str) -> dict[str, Any]:
    """What a test's parameter of this name is in a file, by id."""
    if name == "laid_out":
        return {id_: (tier, one) for tier, every in own.LAYOUTS.items() for id_, one in every.items()}
    if name in ("fault_in_a_job", "fault_by_itself"):
        table = own.NAMED if name == "fault_in_a_job" else own.BY_ITSELF
        return dict(_grouped(own, [(None, table)] if isinstance(table, dict) else table))
    return dict(own.RIGHT) if name == "right" else {one: one for one in (own.FAULTS if name == "fault" else own.ITSELF)}


def _grouped(own: Any, groups: Any) -> Iterator[tuple[str, Any]]:
    for number, (layout, causes) in enumerate(groups):
        for fault, one in causes.items():
            yield f"{fault}-{number}", (fault, layout or own.FAULTS[fault].layout, one)


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Any:
    """The file that has the test."""
    return request.module


def test_a_right_layout_passes(laid_out: tuple[str, Any], own: Any, whitebox: WhiteBox) -> None:
    tier, one = laid_out
    layout, more = (one[0], {"microbatches": one[1]}) if isinstance(one, tuple) else (one, {})
    verdict = own.judged(layout, whitebox=whitebox, **more)
    assert (verdict.outcome, verdict.tier) == ("pass", tier), str(verdict)
    assert passed(verdict) >= {"gradient", "loss", "boundaries"}
    assert {law: law in passed(verdict) for law in own.LAWS} == {law: holds(layout) for law, holds in own.LAWS.items()}
    getattr(own, "also", lambda *_: None)(verdict, layout)


def test_a_fault_is_named(fault: str, own: Any, whitebox: WhiteBox) -> None:
    planted = own.FAULTS[fault]
    verdict = own.judged(planted.layout, own_step=partial(own.step, fault), whitebox=whitebox)
    assert named(verdict) == ("fail", [(planted.kind, place) for place in planted.places]), str(verdict)


def test_a_right_step_passes(right: tuple[Any, str], own: Any, world: World) -> None:
    layout, tier = right
    norm = {"grad-norm"} if own.LAWS["grad-norm"](layout) else set()
    assert_right(world, own.job_of, layout, tier, {"gradient", "loss", "parameters-once"} | norm)


def test_a_step_passes_against_itself(itself: str, own: Any, world: World) -> None:
    assert_right(world, own.job_of, own.RIGHT[itself][0], own.ITSELF[itself], own.ITSELF_LAWS, by_itself=True)


def test_a_fault_in_a_job_is_named(
    fault_in_a_job: tuple[str, Any, Cause | list[Cause]], own: Any, world: World
) -> None:
    fault, layout, causes = fault_in_a_job
    assert_named(world, own.job_of, layout, fault, causes)


def test_a_fault_is_named_against_itself(
    fault_by_itself: tuple[str, Any, Cause | list[Cause]], own: Any, world: World
) -> None:
    fault, layout, causes = fault_by_itself
    assert_named(world, own.job_of, layout, fault, causes, by_itself=True)


OF_ENGINES = test_a_right_layout_passes, test_a_fault_is_named
OF_JOBS = test_a_right_step_passes, test_a_fault_in_a_job_is_named
AGAINST_ITSELF = test_a_step_passes_against_itself, test_a_fault_is_named_against_itself
