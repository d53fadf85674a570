"""The training example: it learns, and equals the single device at every step (a guide runs it with 1F1B)."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden

SCRIPT = Path(__file__).with_name("train_gpt.py")
SHAPE = ("--schedule", "interleaved", "--layers", "5", "--split", "1,2,1,1", "--tied", "--microbatches", "5", "--check")


def run(context: RankContext, words: tuple[str, ...], faulty: bool = False) -> tuple[str, str, object]:
    """What this rank prints and says on standard error, and its exit status.

    ``faulty``: rank 1's third update shifts one of its weights.
    """
    spec: Any = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    example = sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    class Shifts(torch.optim.AdamW):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step(closure)
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 3:
                self.param_groups[0]["params"][1].data.add_(0.5)

    if faulty and context.rank == 1:
        vars(example)["adamw"] = lambda parameters: Shifts(parameters, lr=3e-3)  # the reference has its own
    status: object = 0
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            example.train(example.arguments(words), context.rank, context.ranks)
        except SystemExit as left:
            status = left.code
    return printed.getvalue(), said.getvalue(), status


def test_training_equals_the_single_device_and_the_loss_falls(world: World) -> None:
    (told, _, status), (silent, _, _) = world.run(run, (*SHAPE, "--steps", "12"), ranks=2)
    assert status == 0, told
    golden(told.splitlines()[-1], numbers=False)
    losses = [float(line.split()[3]) for line in told.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] - 0.5
    assert silent == ""


@pytest.mark.sweep
def test_what_cannot_be_is_said_once(world: World) -> None:
    for words in (("--schedule", "nope"), ("--layers", "1")):
        (_, said, status), (_, *silent) = world.run(run, words, ranks=2)
        assert (status, silent) == (2, ["", 2])
        golden(said)


@pytest.mark.sweep
def test_a_difference_is_told_by_its_step_its_rank_and_what_it_is_in(world: World) -> None:
    told, _, statuses = zip(*world.run(run, (*SHAPE, "--steps", "5"), True, ranks=2), strict=True)
    assert statuses == (1, 1)
    golden(told[1], lines="^check", numbers=False)
    assert "equal" not in "".join(told)
