"""One model in two frameworks: their records are compared, names matched by weights."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: ci/frameworks installs it")
pytest.importorskip("deepspeed", reason="deepspeed is not installed: ci/frameworks installs it")

from pipeproof import World
from pipeproof.commands.cli import main
from pipeproof.core.verdict import Verdict
from pipeproof.records.compare import RUNS, compare
from pipeproof.records.record_file import read
from tests.frameworks import gpt_in_deepspeed


def compared(world: World, folder: Path, *, factor: float = 1.0) -> Verdict:
    one, other = (str(folder / name) for name in ("megatron.safetensors", "deepspeed.safetensors"))
    assert world.run(gpt_in_deepspeed.in_megatron, one, ranks=2) == ["", ""]
    assert world.run(gpt_in_deepspeed.in_deepspeed, other, factor, ranks=2) == ["", ""]
    return compare(read(one), read(other), sides=RUNS)


@pytest.mark.pipeproof_ranks
def test_two_frameworks_agree_on_one_model(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = compared(world, tmp_path)
    assert (verdict.outcome, verdict.tier) == ("pass", "fp32"), str(verdict)
    assert "of other names, matched by their weights" in verdict.details
    assert verdict.law("gradient").checked > 30
    assert main(["compare", *(str(tmp_path / f"{name}.safetensors") for name in ("megatron", "deepspeed"))]) == 0
    assert "megatron-core 0.16.1" in capsys.readouterr().out


@pytest.mark.pipeproof_ranks
def test_two_frameworks_that_differ_are_told_apart(world: World, tmp_path: Path) -> None:
    verdict = compared(world, tmp_path, factor=2.0)
    assert verdict.outcome == "fail"
    assert verdict.law("loss").outcome == "fail"
