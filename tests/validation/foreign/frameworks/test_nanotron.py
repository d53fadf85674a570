"""What pipeproof.nanotron knows of nanotron, without it: microbatches, pointers, the reference, weights."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof.foreign.frameworks import nanotron
from pipeproof.foreign.frameworks.nanotron_whole import NanotronError, WholeNanotron, packed_of
from tests.support.like_nanotron import DATA, NanotronModel, Trainer, clip_grad_norm, installed


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


def test_microbatches_come_back_as_they_were() -> None:
    packed = packed_of(DATA)
    assert packed.names == ("input_ids", "label_ids")
    assert {name: one.tolist() for name, one in packed.unpack(packed.pack(DATA[1])).items()} == {
        "input_ids": [[2.0, 2.0]],
        "label_ids": [[1.0, 1.0]],
    }


def test_microbatches_of_other_names_are_said() -> None:
    with pytest.raises(NanotronError, match=r"^microbatch 1 has \['input_ids'\], microbatch 0 \['input_ids', 'label"):
        packed_of([DATA[0], {"input_ids": DATA[0]["input_ids"]}])


def test_the_reference_is_built_for_one_rank_and_gives_the_loss() -> None:
    contexts: list[Any] = []

    def build(context: Any) -> nn.Module:
        contexts.append(context)
        return NanotronModel()

    whole, packed = WholeNanotron(build, ("input_ids", "label_ids")), packed_of(DATA)
    assert (contexts[0].pp_pg.size(), contexts[0].pp_pg.rank()) == (1, 0)
    assert whole(*packed.pack(DATA[0])).item() == NanotronModel()(**DATA[0])["loss"].item()
    with pytest.raises(NanotronError, match=r"^the reference is a int: expected a model of nanotron's$"):
        WholeNanotron(lambda _: 3, ())  # type: ignore[arg-type,return-value]  # that is the point


def test_a_rank_has_a_pointer_to_what_is_elsewhere() -> None:
    trainer = Trainer()
    trainer.model.output_pp_rank = 1  # type: ignore[assignment]  # nanotron's
    held = nanotron.cut(DATA[0], trainer)
    assert held["input_ids"] is DATA[0]["input_ids"]
    assert held["label_ids"].group_rank == 1


def test_copies_in_fp32_are_those_of_the_weights_that_were_given() -> None:
    trainer = Trainer()
    half = trainer.model.first.pp_block.weight  # type: ignore[union-attr]  # a block's
    trainer.grad_accumulator = SimpleNamespace(parameters={"one": {"half": half, "fp32": torch.zeros(2, 2)}})
    whole = WholeNanotron(lambda _: NanotronModel(), ())
    nn.init.ones_(whole.model.first.pp_block.weight)  # type: ignore[union-attr,arg-type]  # a block's
    nanotron.load(trainer, nanotron.step_of(trainer), whole)
    assert trainer.grad_accumulator.parameters["one"]["fp32"].equal(torch.ones(2, 2))


def test_gradients_are_those_that_are_summed_in_fp32() -> None:
    trainer = Trainer()
    trainer.grad_accumulator = SimpleNamespace(get_grad_buffer=lambda name: name)
    names = dict(trainer.model.named_parameters())
    assert nanotron.gradients_of(trainer) == {one: name for name, one in names.items()}


def test_another_wrapper_around_clipping_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = clip_grad_norm.__wrapped__  # type: ignore[attr-defined]  # a function that torch wraps
    monkeypatch.setattr(sys.modules["nanotron.optim.clip_grads"], "clip_grad_norm", bare)
    step, sight = nanotron.step_of(Trainer()), SimpleNamespace()
    with pytest.raises(NanotronError, match=r"^clip_grad_norm is not wrapped"), step.watching(sight):  # type: ignore[arg-type]
        pass


def test_a_reference_that_is_no_function_is_said() -> None:
    given: Any = NanotronModel()
    with pytest.raises(NanotronError, match="reference is a NanotronModel: expected a function that builds it"):
        WholeNanotron(given, ("input_ids", "label_ids"))
