"""What may go wrong in a step: each substitution is named, changes what a microbatch gives, and leaves no trace."""

from collections.abc import Iterator

import torch

from pipeproof.explain.played import ModelBeside, model_beside, play
from pipeproof.explain.substitutions import Substitution, between, change_kept, inside, of_data
from pipeproof.own.case import Case
from pipeproof.own.judgement import setup_of
from tests.support.golden import golden


def beside(model: str) -> ModelBeside:
    setup = setup_of(Case("gpipe", 2, 1, 2, (1, 1), model=model, plan=("train",)))
    return model_beside(setup, play(setup, None, 0)[0])


def every(one: ModelBeside) -> Iterator[Substitution]:
    yield from between(one, 2, torch.float32)
    yield from of_data(one.batches)


def made(one: ModelBeside, change: Substitution) -> object:
    """What the second microbatch gives."""
    found = one.play(one.batches[1] if change.given is None else change.given(1), change.planted)
    return None if found is None else (found.loss, [g if g is None else g.tolist() for g in found.gradients.values()])


def test_each_changes_what_a_microbatch_gives_and_leaves_no_trace() -> None:
    one = beside("dropout")
    nothing = Substitution("", "", (), False)
    before, found = made(one, nothing), list(every(one))
    same = [(change.stages, change.text) for change in found if made(one, change) == before]
    own = "is microbatch 1's"
    assert same == [((0,), f"its input {k} {own}") for k in range(2)]
    assert made(one, change_kept(one, 1)) != before
    assert made(one, nothing) == before
    golden("\n".join(f"{change.kind}, {change.stages}: {change.text}" for change in found))


def test_the_loss_follows_from_a_forward_substitution_between_stages_and_from_no_other() -> None:
    one = beside("pair")
    right, found = one.play(one.batches[0]), list(between(one, 2, torch.float32))
    for change in found:
        wrong = one.play(one.batches[0], change.planted)
        assert right is not None
        assert (wrong.loss != right.loss) == change.forward, change.text
    golden("\n".join(f"{change.stages}: {change.text}" for change in found))


def test_what_modules_do_is_named_for_all_that_are_alike_and_for_each() -> None:
    one = beside("mlp")
    sites = [(stage, f"blocks.{stage}.{name}") for stage in range(2) for name in ("norm.weight", "linear.weight")]
    every = [*inside(one, sites, 2, reaches=lambda change: True)]
    golden("\n".join(f"{change.stages}: {change.text}" for change in every if change.text.endswith(" by 2")))
    assert not [*inside(one, sites, 2, reaches=lambda change: False)]
