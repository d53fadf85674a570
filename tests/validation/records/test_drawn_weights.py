"""Weights that begin alike by a seed, or by a copy of modules, and such as no seed makes so."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from pipeproof.records.drawn_weights import Drawn, DrawnWeights, drawn, looks_drawn

WIDE, BIASED, TABLE = partial(nn.Linear, 8, 8, bias=False), partial(nn.Linear, 8, 8), partial(nn.Embedding, 8, 8)
NARROW, NARROWER = partial(nn.Linear, 8, 6), partial(nn.Linear, 8, 5)
_Makers = list[Callable[[], nn.Module]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_table_with_a_row_of_zeros_looks_drawn_in_any_type(dtype: torch.dtype) -> None:
    table = nn.Embedding(6, 8, padding_idx=0).weight.detach()
    assert looks_drawn(nn.Parameter(table.to(dtype)))
    assert not looks_drawn(nn.Parameter(torch.eye(8, dtype=dtype)))


def test_a_table_that_ends_in_zeros_or_has_short_rows_looks_drawn() -> None:
    draw = torch.Generator().manual_seed(0)
    padded = torch.randn(64, 8, generator=draw)
    padded[24:] = 0
    assert looks_drawn(padded)
    assert all(looks_drawn(torch.randn(64, columns, generator=draw)) for columns in (1, 2, 3))


def test_what_is_in_order_was_not_drawn() -> None:
    for one in (torch.arange(600.0), -torch.arange(600.0).log1p(), torch.arange(1.0, 9.0).log().repeat(64, 1)):
        assert not looks_drawn(nn.Parameter(one))


def twins(one: _Makers, other: _Makers, *, seeds: tuple[int, int] = (0, 0), depth: float = 1.0) -> bool:
    """Whether the first weights of two stages are; the last one of the other is ``depth`` times what was drawn."""
    every: dict[tuple[int, str], Drawn] = {}
    for stage, (makers, seed) in enumerate(zip((one, other), seeds, strict=True)):
        torch.manual_seed(seed)
        made = nn.Sequential(*(each() for each in makers))
        if stage:
            [*made.parameters()][-1].data.mul_(depth)
        for name, weight in made.named_parameters():
            found = drawn(type(made.get_submodule(name.rpartition(".")[0])).__name__, weight)
            assert found is not None
            every[stage, f"{stage}.{name}"] = Drawn(found.kind, found.first, content=str(weight.tolist()))
    first = Drawn(every[0, "0.0.weight"].kind, every[0, "0.0.weight"].first, content="equal")
    every |= {(0, "0.0.weight"): first, (1, "1.0.weight"): Drawn(first.kind, first.first, content="equal")}
    return DrawnWeights(every).are_twins((0, "0.0.weight"), (1, "1.0.weight"))


@pytest.mark.parametrize(
    ("one", "other"), [([WIDE], [WIDE]), ([TABLE, NARROW], [TABLE, NARROWER]), ([WIDE, BIASED], [WIDE, BIASED, WIDE])]
)
def test_one_seed_goes_on_with_the_same_random_numbers(one: _Makers, other: _Makers) -> None:
    assert twins(one, other)
    assert len(one) == 1 or not twins(one, other, seeds=(0, 1))


def test_a_single_weight_that_is_all_of_one_stage_may_be_the_other_stage_s() -> None:
    assert not twins([TABLE, WIDE], [TABLE])


def test_weights_of_deep_layers_are_less_and_of_the_same_random_numbers() -> None:
    assert twins([WIDE, WIDE], [WIDE, WIDE], depth=0.5)


@pytest.mark.parametrize("several", [True, False])
def test_several_of_a_kind_that_are_equal_are_of_one_seed_though_others_were_drawn_anew(several: bool) -> None:
    """As the weights of attention, that no ``apply`` of an initialisation of linear layers reaches."""
    every = {
        (stage, f"{stage}.{layer}.{name}"): Drawn(kind, (float(stage), 1.0 + stage * layer), content=content)
        for stage in (0, 1)
        for layer in (0, 1)
        for name, kind, content in (
            ("q", "Attention", f"q{layer if several or not stage else 0}"),
            ("l", "Linear", f"l{stage}{layer}"),
        )
    }
    assert DrawnWeights(every).are_twins((0, "0.0.q"), (1, "1.0.q")) is several


def test_two_tables_at_the_begin_of_two_stages_may_be_the_same_two() -> None:
    """As words and positions that both ends of a model have: nothing lies between them that was drawn anew."""
    every = {
        (stage, f"{stage}.{name}"): Drawn(kind, (float(stage), 1.0 + stage * at), content=content)
        for stage in (0, 1)
        for at, (name, kind, content) in enumerate(
            [("words", "Embedding", "w"), ("places", "Embedding", "p"), ("l", "Linear", f"l{stage}")]
        )
    }
    assert not DrawnWeights(every).are_twins((0, "0.words"), (1, "1.words"))
