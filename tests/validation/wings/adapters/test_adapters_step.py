"""What a job draws, held against what a check is given."""

import torch

from pipeproof.wings.adapters.step import Drawn, content_of_rows, contents

GIVEN = [{"words": torch.tensor([number, number]), "mask": torch.ones(2)} for number in range(3)]


def test_what_was_given_is_known_in_any_order_in_part_and_with_more_beside_it() -> None:
    drawn = Drawn()
    source = [GIVEN[2], {"words": GIVEN[0]["words"]}, {**GIVEN[1], "ids": torch.tensor(7)}, ("no tensor",)]
    assert list(drawn.noting(source)) == source
    assert not drawn.is_other_than(contents(GIVEN))
    assert drawn.is_other_than(contents(GIVEN[:2]))
    assert not drawn.is_other_than(contents(None))  # a rank that has none cannot tell


def test_other_words_beside_the_same_mask_are_others() -> None:
    drawn = Drawn()
    drawn.note({"words": torch.tensor([9, 9]), "mask": torch.ones(2)})
    assert drawn.is_other_than(contents(GIVEN))


def test_rows_are_known_however_they_are_joined() -> None:
    drawn = Drawn()
    drawn.note_rows([torch.arange(8).view(4, 2)])
    assert not drawn.is_other_than(
        [content_of_rows([torch.arange(4).view(2, 2)]), content_of_rows([torch.tensor([[4, 5], [6, 7]])])]
    )
    assert drawn.is_other_than([content_of_rows([torch.arange(6).view(3, 2)])])


def test_content_tells_the_order_in_which_it_was_drawn() -> None:
    drawn, given = Drawn(), contents(GIVEN)
    assert not drawn.order(given), "nothing was drawn here"
    for number in (2, 0, 1):
        drawn.note(GIVEN[number])
    assert drawn.order(given) == [2, 0, 1]
    assert not drawn.order([*given, *given[:1]]), "two are alike"
    assert not drawn.order(given[:2]), "more was drawn"
    targets = Drawn()
    targets.note_targets([None, torch.tensor([[4], [5], [0], [1]])])
    assert targets.order([content_of_rows([torch.tensor([[k], [k + 1]])]) for k in (0, 4)]) == [1, 0]
    assert not targets.is_other_than(given), "other targets are no other data"


def test_a_source_keeps_what_it_is() -> None:
    class Source(list[int]):
        epoch = 3

    assert Drawn().noting(None) is None
    assert Drawn().noting(Source()).epoch == 3
