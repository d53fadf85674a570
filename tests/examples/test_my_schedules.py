import pytest

from pipeproof import Case, World, validate


@pytest.mark.parametrize("split", [(2, 2), (1, 3)])
def test_a_split_does_not_change_the_answer(pipeproof_world: World, split: tuple[int, ...]) -> None:
    case = Case("1f1b", ranks=2, virtual=1, microbatches=4, split=split, model="gpt-tied")
    validate(case, pipeproof_world).raise_if_failed()
