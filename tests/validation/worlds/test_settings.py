"""What a job sets for its process is put back: the next one on the same ranks computes as if it were the first."""

import pytest
import torch

from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.settings import Settings
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

Found = tuple[object, ...]


def asks(context: RankContext) -> Found:
    products = torch.backends.mkldnn.matmul.fp32_precision, torch.get_float32_matmul_precision()
    modes = torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled()
    return (*products, *modes, torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads())


def sets(context: RankContext, newer: bool, raises: bool) -> Found:
    if newer:
        torch.backends.fp32_precision = "tf32"  # type: ignore[assignment]
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    else:
        torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    torch.set_anomaly_enabled(True)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    if raises:
        raise ValueError("on purpose")
    return torch.backends.mkldnn.matmul.fp32_precision, torch.is_grad_enabled()


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_no_job_computes_as_an_earlier_one_did(world: World, newer: bool, raises: bool) -> None:
    before = world.run(asks, ranks=2)
    if raises:
        with pytest.raises(RankFailed, match="on purpose"):
            world.run(sets, newer, raises, ranks=2)
    else:
        assert world.run(sets, newer, raises, ranks=2) == [("bf16", False)] * 2
    assert world.run(asks, ranks=2) == before


def test_what_is_as_it_was_is_not_set() -> None:
    settings, threads = Settings(), torch.get_num_threads()
    settings.put_back()
    assert torch.get_num_threads() == threads
    torch.set_default_dtype(torch.float64)
    settings.put_back()
    assert torch.get_default_dtype() is torch.float32
