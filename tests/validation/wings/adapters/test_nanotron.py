"""What pipeproof.nanotron knows of nanotron, without it; a step on a model that is like its: judged, or refused."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipeproof
from pipeproof.core.verdict import Verdict
from pipeproof.wings.adapters.nanotron import Nanotron, NanotronError, local_tensors, whole_of
from tests.support.golden import golden
from tests.support.like_nanotron import DATA, NanotronModel, TensorPointer, Trainer, clip_grad_norm, installed


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


def test_microbatches_come_back_as_they_were() -> None:
    whole = whole_of(nn.Identity, DATA)
    given = [*map(whole.given, whole.microbatches)]
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


def judged(trainer: Any, *, microbatches: Any = DATA, drawn: Any = DATA, divisor: float = 2, **config: Any) -> Verdict:
    inside = clip_grad_norm.__closure__[0].cell_contents  # type: ignore[attr-defined]  # a function that torch wraps
    with pipeproof.nanotron.check_step(
        trainer, microbatches, reference=lambda context: NanotronModel(**config), timeout_s=5
    ) as check:
        if isinstance(trainer, Trainer) and isinstance(trainer.model, NanotronModel):
            before = [one.detach().clone() for one in trainer.model.parameters()]
            trainer.training_step(iter(drawn), divisor)
            assert not any(map(torch.equal, before, trainer.model.parameters())), "it has trained in any case"
    assert clip_grad_norm.__closure__[0].cell_contents is inside  # type: ignore[attr-defined]
    assert sys.modules["nanotron.distributed"].get_rank() == 0
    assert "step" not in vars(getattr(trainer, "optimizer", SimpleNamespace()))
    return check.verdict


def test_a_right_step_passes_before_it_is_clipped() -> None:
    trainer = Trainer()
    nn.init.constant_(trainer.model.first.pp_block.weight, 0.25)  # type: ignore[union-attr,arg-type]  # it has trained
    verdict = judged(trainer)
    assert verdict.outcome == "pass", str(verdict)
    assert {name: verdict.law(name).checked for name in ("loss", "gradient", "grad-norm")} == {
        "loss": 2,
        "gradient": 4,
        "grad-norm": 1,
    }


def test_a_loss_that_is_not_divided_is_named() -> None:
    assert [cause.kind for cause in judged(Trainer(), divisor=1).causes] == ["scale"]


def test_a_block_without_a_step_is_said() -> None:
    with pipeproof.nanotron.check_step(Trainer(), DATA, reference=lambda _: NanotronModel(), timeout_s=5) as check:
        pass
    golden(check.verdict.details.splitlines()[0])


def changed(**what: Any) -> Trainer:
    trainer = Trainer()
    for name, value in what.items():
        owner, _, leaf = name.rpartition("__")
        place: Any = trainer
        for step in filter(None, owner.split("__")):
            place = getattr(place, step)
        setattr(place, leaf, value)
    return trainer


POINTED = [{**one, "label_ids": TensorPointer(1)} for one in DATA]


@pytest.mark.parametrize(
    ("trainer", "given"),
    [
        (lambda: "none", {}),
        (lambda: changed(parallel_context__tensor_parallel_size=2), {}),
        (lambda: changed(parallel_context__context_parallel_size=2), {}),
        (lambda: changed(parallel_context__expert_parallel_size=2), {}),
        (lambda: Trainer(moe_config="8 experts"), {}),
        (lambda: Trainer(resid_pdrop=0.1), {}),
        (lambda: changed(model__dropout=nn.Dropout(0.1)), {}),
        (lambda: changed(model__first__rank=1), {}),
        (lambda: changed(model=nn.Linear(2, 2)), {}),
        (lambda: changed(pipeline_engine=3), {}),
        (Trainer, {"microbatches": DATA[:1]}),
        (Trainer, {"microbatches": [*DATA[:1], 3]}),
        (Trainer, {"microbatches": POINTED}),
        (Trainer, {"microbatches": None}),
        (Trainer, {"tied": ["first.pp_block.weight", "second.pp_block.weight"]}),
        (Trainer, {"moe_config": 3}),
        (Trainer, {"microbatches": iter(DATA)}),
    ],
)
def test_what_is_not_covered_is_said_and_the_job_goes_on(trainer: Any, given: Any) -> None:
    verdict = judged(trainer(), **given)
    assert verdict.outcome == "unknown"
    golden(verdict.details.splitlines()[0])


@pytest.mark.parametrize("module", ["nanotron", "nanotron.parallel.pipeline_parallel.engine"])
def test_a_package_that_is_missing_or_does_not_import_is_said(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    golden(judged(Trainer()).details.splitlines()[0])


def test_what_goes_to_other_ranks_is_on_the_cpu() -> None:
    class There(torch.Tensor):
        """A tensor of another device, as far as it can be one here."""

        def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
            return torch.zeros(1)

    (found,) = local_tensors([{"input_ids": torch.ones(1).as_subclass(There), "at": "a pointer"}])
    assert {name: (type(one), one.item()) for name, one in found.items()} == {"input_ids": (torch.Tensor, 0.0)}


def test_a_step_of_other_microbatches_than_were_given_is_no_wrong_step() -> None:
    verdict = judged(Trainer(), drawn=[DATA[0], {**DATA[1], "input_ids": torch.full((1, 2), 5.0)}])
    assert verdict.outcome == "unknown"
    golden(verdict.details.splitlines()[0])
    assert judged(Trainer(), drawn=DATA[:1] * 2).outcome == "fail"  # it is given, and run twice


def test_a_source_of_microbatches_is_refused_and_left_to_the_job() -> None:
    source = iter(DATA)
    assert judged(Trainer(), microbatches=source).outcome == "unknown"
    assert len(list(source)) == 2
