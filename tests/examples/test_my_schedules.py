"""Schedules under test, as a user writes it: pytest, pytest -n 2, or torchrun --nproc-per-node 4 -m pytest."""

import pytest

from pipeproof import Case, World, validate


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("split", [(2, 2, 2, 2), (1, 3, 3, 1)])
def test_a_split_does_not_change_the_answer(pipeproof_world: World, schedule: str, split: tuple[int, ...]) -> None:
    case = Case(schedule, ranks=4, virtual=1, microbatches=6, split=split, model="gpt-tied")
    validate(case, pipeproof_world).raise_if_failed()
