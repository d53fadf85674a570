"""What pipeproof.colossalai knows without ColossalAI: how batches are cut and packed, and which stage has what."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.wings.adapters.colossalai import ColossalAIError
from pipeproof.wings.adapters.colossalai_whole import cut, stages_of, tell_chunks_apart, whole_of
from pipeproof.wings.adapters.whole import OfMicrobatch, Packed

ROWS = torch.arange(8).view(4, 2)


def test_a_batch_is_cut_packed_and_joined_again() -> None:
    batch = {"words": ROWS, "name": "text", "labels": ROWS + 1}
    microbatches = cut(batch, 2, None)
    assert microbatches[1]["words"].tolist() == [[4, 5], [6, 7]]
    packed = Packed.of(microbatches)
    tensors = [packed.pack(one) for one in microbatches]
    assert len(tensors[0]) == 2
    joined = packed.unpack([torch.cat(parts) for parts in zip(*tensors, strict=True)])
    assert joined["words"].equal(ROWS)
    assert joined["name"] == "text"
    assert [one["labels"].tolist() for one in cut(batch, None, 1)] == [[row] for row in (ROWS + 1).tolist()]


@pytest.mark.parametrize(
    ("microbatches", "sentence"),
    [
        ([{"words": ROWS}, {"labels": ROWS}], "^microbatch 1 is a dict of .*'labels'.*, microbatch 0 is a dict of"),
        ([{"words": ROWS}, {"words": ROWS[:1]}], "^microbatch 1 has 1 rows, microbatch 0 has 4: expected the same"),
        ([{"words": ROWS, "n": 1}, {"words": ROWS, "n": 2}], "^microbatch 1 is a dict"),
        (
            [(ROWS, ROWS[:1])],
            "^microbatch 0 has tensors of 4 and of 1 rows: ColossalAI cuts every tensor along dimension",
        ),
        ([(ROWS, torch.tensor(1))], "^microbatch 0 has a tensor without dimensions"),
        (["words"], "^microbatch 0 has no tensor in it"),
    ],
)
def test_microbatches_that_no_batch_is_cut_into_are_refused(microbatches: list[Any], sentence: str) -> None:
    with pytest.raises(ColossalAIError, match=sentence):
        whole_of(nn.Identity, len, microbatches)


@pytest.mark.parametrize(("count", "size"), [(3, None), (None, 3), (2, 1)])
def test_a_batch_that_cannot_be_cut_evenly_is_refused(count: int | None, size: int | None) -> None:
    with pytest.raises(ColossalAIError, match=r"^the batch has 4 rows: expected what is cut into"):
        cut((ROWS,), count, size)


def test_the_criterion_is_given_the_microbatch_of_its_number() -> None:
    criterion = OfMicrobatch(lambda outputs, microbatch: outputs + microbatch["x"], {(0,): {"x": 1}, (1,): {"x": 2}})
    assert criterion(torch.tensor(1), torch.tensor([1])) == 3


def test_a_reference_that_drops_out_is_refused() -> None:
    with pytest.raises(ColossalAIError, match=r"^1 drops out with p=0\.5: set p to 0 for the check$"):
        whole_of(lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout()), len, []).build()


def test_a_reference_is_cast_with_its_inputs() -> None:
    whole = whole_of(lambda: nn.Linear(2, 2), len, [(torch.ones(1, 2),)], torch.bfloat16)
    assert whole.build()(torch.ones(1, 2)).dtype == torch.bfloat16


class Model(nn.Module):
    """The layers that rank 0 of two has, of 4 in 4 stages."""

    def __init__(self, held: tuple[int, ...]) -> None:
        super().__init__()
        self.words = nn.Embedding(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) if k in held else nn.Module() for k in range(4))
        self.head = nn.Linear(2, 2)
        self.observed: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Manager(SimpleNamespace):
    @contextmanager
    def switch_model_chunk_id(self, chunk: int) -> Iterator[None]:
        before, self.model_chunk_id = self.model_chunk_id, chunk
        yield
        self.model_chunk_id = before


def manager(*, zbv: bool, ranges: list[list[int]]) -> Any:
    return Manager(
        is_interleave=True,
        use_zbv=zbv,
        stage=0,
        num_stages=2,
        num_model_chunks=2,
        stage_indices=ranges,
        model_chunk_id=0,
    )


@pytest.mark.parametrize(("zbv", "held"), [(True, (0, 3)), (False, (0, 2))])
def test_virtual_stages_of_one_module_are_told_apart(zbv: bool, held: tuple[int, ...]) -> None:
    model, stages = Model(held), manager(zbv=zbv, ranges=[[k, k + 1] for k in held])
    found = stages_of(stages, model)
    assert list(found) == ([0, 3] if zbv else [0, 2])
    names = [[name for name, _ in one.named_parameters()] for one in found.values()]
    assert names[0] == ["words.weight", "layers.0.weight", "layers.0.bias"]
    assert names[1] == [f"layers.{held[1]}.weight", f"layers.{held[1]}.bias", "head.weight", "head.bias"]
    called = []
    for number, one in found.items():
        one.register_forward_hook(lambda *_, number=number: called.append(number))
    with tell_chunks_apart(stages, model, found):
        model.eval()
        for stages.model_chunk_id in (1, 0):
            assert model(torch.zeros(1)) == 1
    assert called == [*found][::-1]
    assert "forward" not in vars(model)


def test_layers_that_are_in_no_list_are_said() -> None:
    with pytest.raises(ColossalAIError, match=r"^no list of the model has layers 0 to 0, 1 to 1, and no others"):
        stages_of(manager(zbv=False, ranges=[[0, 1], [1, 2]]), Model((0, 3)))
