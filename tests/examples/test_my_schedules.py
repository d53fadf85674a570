from pipeproof import Case, World, validate


def test_a_split_does_not_change_the_answer(pipeproof_world: World) -> None:
    for split in ((2, 2), (1, 3)):
        case = Case("1f1b", ranks=2, virtual=1, microbatches=4, split=split, model="gpt-tied")
        validate(case, pipeproof_world).raise_if_failed()
