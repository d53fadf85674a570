"""What a stage may have done instead: told by everything that it put out, not by the first tensor alone."""

import torch
from torch import Tensor

from pipeproof.cases.case import Case
from pipeproof.cases.judgement import setup_of
from pipeproof.diagnosis.played import Played, play
from pipeproof.diagnosis.what_ifs import computed
from pipeproof.observers.observed import Observed, RankOperation

CASE = Case("gpipe", 2, 1, 2, (1, 1), model="carry", plan=("train",))


def played() -> Played:
    ran = (RankOperation("train", (), ()),)
    return play(setup_of(CASE), Observed(CASE.built, (ran, ran)), 0)[0]


def named(first: float, second: float) -> tuple[str, str] | None:
    """What is said of a stage whose outputs are so many times the right ones."""
    now = played()
    one, two = (tensor * factor for tensor, factor in zip(now.boundaries[0].outputs[0], (first, second), strict=True))
    seen: list[Tensor | None] = [one, two]
    with torch.no_grad():
        return computed(setup_of(CASE), {0: now}, 0, 0, microbatch=0, seen=seen, tried={})


def test_a_wrong_second_output_is_no_other_mode() -> None:
    assert named(1.0, 2.0) is None
    assert named(2.0, 1.0) is None


def test_what_all_outputs_say_is_told() -> None:
    found = named(1.0, 1.0)
    assert found is not None
    assert found[0] == "mode"
