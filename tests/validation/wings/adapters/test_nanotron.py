"""What pipeproof.nanotron knows of nanotron, without it: microbatches, pointers, the reference, weights."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.wings.adapters.nanotron import Nanotron, NanotronError, whole_of
from tests.support.like_nanotron import DATA, NanotronModel, Trainer, clip_grad_norm, installed


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


def test_microbatches_come_back_as_they_were() -> None:
    whole = whole_of(nn.Identity, DATA)
    _, given = whole.given(None, list(whole.microbatches))
    assert {name: one.tolist() for name, one in given[1].items()} == {
        "input_ids": [[2.0, 2.0]],
        "label_ids": [[1.0, 1.0]],
    }


def test_microbatches_of_other_names_are_said() -> None:
    with pytest.raises(
        NanotronError, match=r"^microbatch 1 is a dict of \['input_ids'\], microbatch 0 is a dict of \['input_ids', 'la"
    ):
        whole_of(nn.Identity, [DATA[0], {"input_ids": DATA[0]["input_ids"]}])


def test_the_reference_is_built_for_one_rank_and_gives_the_loss() -> None:
    contexts: list[Any] = []

    def build(context: Any) -> nn.Module:
        contexts.append(context)
        return NanotronModel()

    whole = whole_of(build, DATA)
    made = whole.build()
    assert (contexts[0].pp_pg.size(), contexts[0].pp_pg.rank()) == (1, 0)
    assert made(*whole.microbatches[0]).item() == NanotronModel()(**DATA[0])["loss"].item()
    with pytest.raises(NanotronError, match=r"^the reference is a int: expected a model of nanotron's$"):
        whole_of(lambda _: 3, ()).build()


def test_a_rank_has_a_pointer_to_what_is_elsewhere() -> None:
    trainer = Trainer()
    trainer.model.output_pp_rank = 1  # type: ignore[assignment]  # nanotron's
    held = Nanotron(trainer).share_of(DATA[0])
    assert held["input_ids"] is DATA[0]["input_ids"]
    assert held["label_ids"].group_rank == 1


def test_copies_in_fp32_are_those_of_the_weights_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    trainer = Trainer()
    half = trainer.model.first.pp_block.weight  # type: ignore[union-attr]  # a block's
    trainer.grad_accumulator = SimpleNamespace(parameters={"one": {"half": half, "fp32": torch.zeros(2, 2)}})
    whole: Any = whole_of(lambda _: NanotronModel(), ()).build()
    nn.init.ones_(whole.model.first.pp_block.weight)
    Nanotron(trainer).load(Nanotron(trainer).step(), DATA, whole)
    assert trainer.grad_accumulator.parameters["one"]["fp32"].equal(torch.ones(2, 2))


def test_gradients_are_those_that_are_summed_in_fp32() -> None:
    trainer = Trainer()
    trainer.grad_accumulator = SimpleNamespace(get_grad_buffer=lambda name: name)
    names = dict(trainer.model.named_parameters())
    assert Nanotron(trainer).step().gradients() == {one: name for name, one in names.items()}


def test_another_wrapper_around_clipping_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = clip_grad_norm.__wrapped__  # type: ignore[attr-defined]  # a function that torch wraps
    monkeypatch.setattr(sys.modules["nanotron.optim.clip_grads"], "clip_grad_norm", bare)
    step, sight = Nanotron(Trainer()).step(), SimpleNamespace()
    with pytest.raises(NanotronError, match=r"^clip_grad_norm is not wrapped"), step.watching(sight):  # type: ignore[arg-type]
        pass


def test_a_reference_that_is_no_function_is_said() -> None:
    given: Any = NanotronModel()
    with pytest.raises(NanotronError, match="reference is a NanotronModel: expected a function that builds it"):
        whole_of(given, ()).build()
