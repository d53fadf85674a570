"""The training example: it learns, and equals the single device at every step (a guide runs it with 1F1B)."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden

SCRIPT = Path(__file__).with_name("train_gpt.py")
SHAPE = ("--schedule", "interleaved", "--layers", "5", "--split", "1,2,1,1", "--tied", "--microbatches", "5", "--check")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(context: RankContext, words: tuple[str, ...], faulty: bool = False) -> tuple[str, object]:
    """What this rank prints, and its exit status. ``faulty``: rank 1's third update shifts one of its weights."""
    example = load()

    class Shifts(torch.optim.AdamW):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step(closure)
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 3:
                self.param_groups[0]["params"][1].data.add_(0.5)

    if faulty and context.rank == 1:
        vars(example)["adamw"] = lambda parameters: Shifts(parameters, lr=3e-3)  # the reference has its own
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            example.train(example.arguments(words), context.rank, context.ranks)
        except SystemExit as left:
            return printed.getvalue(), left.code
    return printed.getvalue(), 0


def test_training_equals_the_single_device_and_the_loss_falls(world: World) -> None:
    (told, status), (silent, _) = world.run(train, (*SHAPE, "--steps", "12"), ranks=2)
    assert status == 0, told
    golden(told.splitlines()[-1], numbers=False)
    losses = [float(line.split()[3]) for line in told.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] - 0.5
    assert silent == ""


def refuse(context: RankContext, words: tuple[str, ...]) -> tuple[str, object]:
    """What this rank says on standard error, and its exit status."""
    example = load()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            example.train(example.arguments(words), context.rank, context.ranks)
        except SystemExit as left:
            return said.getvalue(), left.code
    return said.getvalue(), 0


@pytest.mark.sweep
def test_what_cannot_be_is_said_once(world: World) -> None:
    (said, status), silent = world.run(refuse, ("--schedule", "nope"), ranks=2)
    assert status == 2
    golden(said)
    assert silent == ("", 2)
    (said, _), _ = world.run(refuse, ("--layers", "1"), ranks=2)
    golden(said)


@pytest.mark.sweep
def test_a_difference_is_told_by_its_step_its_rank_and_what_it_is_in(world: World) -> None:
    told, statuses = zip(*world.run(train, (*SHAPE, "--steps", "5"), True, ranks=2), strict=True)
    assert statuses == (1, 1)
    golden(told[1], lines="^check", numbers=False)
    assert "equal" not in "".join(told)
