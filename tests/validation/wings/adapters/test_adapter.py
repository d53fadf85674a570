"""What users call is what an adapter has, and another framework's adapter is one class."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipeproof
from pipeproof import StepResult
from pipeproof.records.record_file import read
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.adapters import adapter
from pipeproof.wings.adapters.adapter import Adapter
from pipeproof.wings.adapters.framework import AdapterError, Framework
from pipeproof.wings.adapters.step import FrameworkStep, Sight
from pipeproof.wings.adapters.whole import Whole
from tests.support.doubles import InThisProcess
from tests.support.steps import blocks, loss_fn, pairs

FRONTS = ("colossalai", "deepspeed", "megatron", "nanotron", "torchtitan", "transformers")


@pytest.mark.parametrize("name", FRONTS)
def test_an_adapter_imports_nothing_of_its_framework(name: str) -> None:
    own = getattr(pipeproof, name)
    assert own is import_module(f"pipeproof.wings.adapters.{name}")
    assert {"check_step", "imports", "observe", "record_step", "validate"} <= {*own.__all__}
    assert name not in sys.modules


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("megatron", {"forward_step": len}, "megatron-core is not installed: pip install"),
        ("deepspeed", {}, r"deepspeed is not installed: pip install deepspeed==0\.19"),
        ("torchtitan", {"loss_fn": len}, "torchtitan is not installed: pip install"),
        ("colossalai", {"criterion": len}, r"colossalai is not installed: pip install --no-deps colossalai==0\.5"),
        ("nanotron", {}, "nanotron is not installed: pip install"),
        ("transformers", {}, "transformers is not installed: pip install"),
    ],
)
def test_without_its_framework_a_sentence_says_so(
    name: str, given: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AdapterError, match=f"^{sentence}"):
        getattr(pipeproof, name).validate(len, reference=nn.Module, microbatches=[], ranks=2, **given)


class Engine:
    """A framework's engine, as its makers could have written it."""

    def __init__(self, factor: float) -> None:
        self.model, self.losses, self.factor = blocks(2), list[torch.Tensor](), factor

    def train(self, microbatches: Sequence[Any]) -> None:
        for inputs, target in microbatches:
            loss = loss_fn(self.model(inputs), target)
            self.losses.append(loss.detach())
            (loss * self.factor / len(microbatches)).backward()
        self.step()

    def step(self) -> None:
        """The optimizer's."""


@dataclass(frozen=True)
class Own(Adapter):
    engine: Engine
    framework = Framework("ours", "pipeproof", ("0.1",), "pip install pipeproof")

    def step(self) -> FrameworkStep:
        return FrameworkStep(
            {0: self.engine.model},
            lambda stage, name: name,
            lambda: {one: one.grad for one in self.engine.model.parameters()},
            lambda: self.engine.losses,
            self._watching,
        )

    @contextmanager
    def _watching(self, sight: Sight) -> Iterator[None]:
        self.engine.step = sight.complete  # type: ignore[method-assign]
        yield
        del self.engine.step

    def whole(self, reference: Any, microbatches: Sequence[Any]) -> Whole:
        return Whole(reference, reference, microbatches, loss_fn)


def build() -> nn.Module:
    return blocks(2)


@pytest.mark.parametrize(("factor", "said"), [(1.0, ("pass", [])), (3.0, ("fail", ["scale"]))])
def test_a_step_of_another_framework_is_checked(factor: float, said: Any) -> None:
    engine = Engine(factor)
    with adapter.check_step(Own(engine), pairs(3), reference=build, timeout_s=5) as check:
        engine.train(pairs(3))
    assert (check.verdict.outcome, [one.kind for one in check.verdict.causes]) == said, str(check.verdict)
    assert "step" not in vars(engine)


@pytest.mark.parametrize(("factor", "said"), [(1.0, ("pass", [])), (3.0, ("fail", ["scale"]))])
def test_a_step_of_it_is_validated(factor: float, said: Any) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> StepResult:
        engine = Engine(factor)
        with adapter.observe(Own(engine), microbatches, model) as observed:
            engine.train([*observed.data_iterator])
        return observed.result()

    whole, whitebox = Whole(build, build, pairs(3), loss_fn), WhiteBox(InThisProcess())
    verdict = adapter.validate(Own.framework, step, whole, ranks=1, whitebox=whitebox)
    assert (verdict.outcome, [one.kind for one in verdict.causes]) == said, str(verdict)


def test_it_is_recorded_and_observed(tmp_path: Path) -> None:
    engine = Engine(1.0)
    with adapter.record_step(Own(engine), pairs(3), str(tmp_path / "a"), timeout_s=5):
        engine.train(pairs(3))
    (one,) = read(tmp_path / "a").operations
    assert one.losses == tuple(map(float, engine.losses))
    engine, reference = Engine(1.0), build()
    with torch.no_grad():
        next(reference.parameters()).add_(1.0)
    with adapter.observe(Own(engine), pairs(3), reference) as observed:
        engine.train([*observed.data_iterator])
    handed = observed.result()
    assert next(engine.model.parameters()).equal(next(reference.parameters()))
    assert len(handed.losses) == 3
    assert set(handed.gradients) == set(engine.model.parameters())


def test_a_step_that_cannot_be_held_against_itself_says_so() -> None:
    composed = import_module("pipeproof.wings.composed").StageByStage()
    with adapter.check_step(Own(Engine(1.0)), pairs(3), reference=composed, timeout_s=5) as check:
        pass
    assert "held against itself" in check.verdict.details


def test_a_whole_model_that_cannot_be_built_leaves_its_contract_to_the_verdict() -> None:
    def failing() -> nn.Module:
        raise RuntimeError("the user's")

    whole = Whole(failing, failing, pairs(1), loss_fn, lambda model, every: 1 / 0)
    assert whole.contract_in_step() == Whole(build, build, ()).contract_in_step()
    assert replace(whole, microbatches=()).contract_in_step() == whole.contract_in_step()
