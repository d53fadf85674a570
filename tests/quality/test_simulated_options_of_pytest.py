"""pytest's options for simulated ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.golden import golden
from tests.support.warm_start import Ended

Run = Callable[..., Ended]

EXHAUSTED = """
import torch, torch.distributed as dist
from torch import nn

def step(model, microbatches):
    layer, losses = model[dist.get_rank()], []
    for x, target in microbatches:
        if dist.get_rank() == 0:
            y = layer(x)
            dist.send(y.detach(), 1)
            dist.recv(gradient := torch.empty_like(y), 1)
            y.backward(gradient)
        else:
            dist.recv(x := torch.empty(2, 3), 0)
            loss = nn.functional.mse_loss(layer(x.requires_grad_()), target)
            (loss / len(microbatches)).backward()
            dist.send(x.grad, 0)
            losses.append(loss.item())
    return layer, losses or None

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

def test_step(whitebox):
    data = [(torch.ones(2, 3) * k, torch.zeros(2, 3)) for k in range(2)]
    whitebox.validate(
        step, reference=model, microbatches=data, ranks=2, loss_fn=nn.functional.mse_loss
    ).raise_if_failed()
"""


def test_every_interleaving_of_a_step_runs_and_they_are_counted(python: Run, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(EXHAUSTED)
    ended = python(tmp_path, "-m", "pytest", "--pipeproof-world=simulated", "--pipeproof-exhaust", "-q")
    assert ended.returncode == 0, ended.stdout
    golden(ended.stdout, lines="^pipeproof:")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--pipeproof-exhaust"],
            "--pipeproof-exhaust has no effect without --pipeproof-world=simulated: leave it out",
        ),
        (["--pipeproof-world=simulated", "--pipeproof-room=64"], "--pipeproof-room=64: transport gloo has no room"),
        (["--pipeproof-world=simulated", "--pipeproof-exhaust=0"], "--pipeproof-exhaust is 0: expected the most"),
        (["--pipeproof-interleaving=late"], "'late': expected a seed, or in-turn"),
    ],
)
def test_options_of_simulated_ranks_that_make_no_sense(
    python: Run, tmp_path: Path, words: list[str], said: str
) -> None:
    ended = python(tmp_path, "-m", "pytest", *words)
    assert ended.returncode == 4
    assert said in ended.stdout
