"""What dashboards are told of a verdict."""

import math
from dataclasses import replace
from typing import Any

import pytest

import pipeproof
from pipeproof.records.dashboard import WriterError, log_verdict
from tests.support.verdicts import FAILED, PASSED


class Board:
    """A writer of TensorBoard's form."""

    def __init__(self) -> None:
        self.told: dict[str, tuple[Any, int]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told[name] = value, step

    add_text = add_scalar


class Run:
    """A run of wandb's form."""

    def __init__(self) -> None:
        self.told: dict[str, tuple[Any, int]] = {}

    def log(self, values: dict[str, Any], *, step: int) -> None:
        self.told |= {name: (value, step) for name, value in values.items()}


@pytest.mark.parametrize("writer", [Board(), Run()], ids=["tensorboard", "wandb"])
def test_a_dashboard_is_told_how_a_step_went(writer: Any) -> None:
    pipeproof.log_verdict(replace(PASSED, outcome="pass"), 7, writer)
    assert {name: value for name, (value, _) in writer.told.items()} == {
        "pipeproof/outcome": 1.0,
        "pipeproof/worst": PASSED.worst,
        "pipeproof/over_rounding": PASSED.over_rounding,
        "pipeproof/tier": PASSED.tier,
    }
    log_verdict(FAILED, 8, writer)
    assert {step for _, step in writer.told.values()} == {8}
    assert writer.told["pipeproof/outcome"][0] == 0.0
    assert writer.told["pipeproof/verdict"][0] == str(FAILED)
    assert all(math.isfinite(value) for value, _ in writer.told.values() if isinstance(value, float))


def test_errors_are_measured_by_what_rounding_does() -> None:
    laws = [
        replace(PASSED.laws[0], worst=worst, floor=floor) for worst, floor in ((0.0, 0.0), (3e-7, 1e-7), (1e-6, 1e-5))
    ]
    verdict = replace(PASSED, laws=tuple(laws))
    assert (verdict.worst, verdict.over_rounding) == (1e-6, pytest.approx(3.0))
    assert replace(PASSED, laws=(replace(laws[0], worst=1.0),)).over_rounding == math.inf
    assert replace(PASSED, laws=()).over_rounding == 0.0


def test_ranks_that_log_nothing_may_call_it_and_other_writers_are_refused() -> None:
    log_verdict(FAILED, 1, None)
    with pytest.raises(WriterError, match="writer is a list: expected a SummaryWriter of TensorBoard, a run of wandb"):
        log_verdict(FAILED, 1, [])
