"""What a process keeps once is each simulated rank's own; what a rank takes of another's is refused by name."""

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import attention
from torch.utils import checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World


def in_its_environment(context: RankContext) -> list[str]:
    os.environ.setdefault("OF_THIS_RANK", str(context.rank))
    dist.barrier()
    names = "OF_THIS_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    return [os.environ[name] for name in names]


def test_the_environment_is_a_ranks_own_as_a_launcher_would_set_it(simulated: World, world: World) -> None:
    real = world.run(in_its_environment, ranks=2)
    for simulated.seed in range(2):
        assert (
            simulated.run(in_its_environment, ranks=2) == real == [["0", "0", "0", "2", "2"], ["1", "1", "1", "2", "2"]]
        )


def noted_optimizers(context: RankContext) -> int:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen = []
    register_optimizer_step_post_hook(lambda optimizer, given, named: seen.append(optimizer))
    dist.barrier()
    weight = torch.nn.Parameter(torch.ones(1))
    torch.optim.SGD([weight], lr=0.1).step()
    dist.barrier()
    return len(seen)


def test_hooks_of_all_optimizers_are_those_of_a_ranks_own(simulated: World) -> None:
    assert simulated.run(noted_optimizers, ranks=3) == [1, 1, 1]


def switched(context: RankContext) -> list[object]:
    """What people set for a block of code, as it is in the midst of one in which ranks take turns, and behind it."""
    first, seen = context.rank == 0, []
    with (
        torch.autograd.set_detect_anomaly(first),
        attention.sdpa_kernel(getattr(attention.SDPBackend, "FLASH_ATTENTION" if first else "MATH")),
        set_checkpoint_early_stop(first),
        warnings.catch_warnings(record=True) as warned,
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        warnings.simplefilter("always" if first else "ignore")
        torch.set_float32_matmul_precision("high" if first else "highest")
        torch.use_deterministic_algorithms(first)
        torch.set_num_threads(1 + first)
        for _ in range(2):
            dist.barrier()
        sys.stdout.write(f"{context.rank}\n")
        warnings.warn("said", stacklevel=1)
        dist.barrier()
        seen += [torch.is_anomaly_enabled(), torch.backends.cuda.flash_sdp_enabled()]
        seen += [checkpoint._enable_checkpoint_early_stop, torch.get_float32_matmul_precision() == "high"]
        seen += [torch.are_deterministic_algorithms_enabled(), torch.get_num_threads() == 2]
    dist.barrier()
    return [seen, len(warned or ()), printed.getvalue(), torch.is_anomaly_enabled(), len(warnings.filters)]


def test_what_is_set_for_a_block_of_code_is_a_ranks_own_and_gone_after_a_run(simulated: World) -> None:
    for simulated.seed in range(6):
        (*one, count), (*other, _) = simulated.run(switched, ranks=2)
        assert one == [[True] * 6, 1, "0\n", False]
        assert other == [[False] * 6, 0, "1\n", False]
        assert simulated.run(switched, ranks=1)[0] == [*one, count], "no run leaves any of it"


def with_newer_settings(context: RankContext) -> list[str]:
    """How products are rounded, told by one rank in a way that makes torch refuse to say it in the older one."""
    if context.rank == 0:
        torch.backends.fp32_precision = "tf32"  # type: ignore[assignment]
        torch.backends.mkldnn.conv.fp32_precision = "bf16"
    seen = []
    for _ in range(2):
        dist.barrier()
        seen += [torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision]
    return seen if context.rank == 0 else [*seen, torch.get_float32_matmul_precision()]


def test_torchs_newer_settings_of_products_are_a_ranks_own_too(simulated: World) -> None:
    for simulated.seed in range(4):
        one, other = simulated.run(with_newer_settings, ranks=2)
        assert one == ["tf32", "bf16"] * 2
        assert other == ["none", "none"] * 2 + ["highest"]


@pytest.fixture
def emptied(simulated: World) -> Iterator[World]:
    """What a module keeps that ranks share is not there before and after."""
    simulated.run(forgets, ranks=1)
    yield simulated
    simulated.run(forgets, ranks=1)


def forgets(context: RankContext) -> None:
    vars(torch).pop(PLACE, None)


PLACE = "_kept_by_a_test"


def uses_what_is_kept(context: RankContext) -> str:
    kept: Any = vars(torch).setdefault(PLACE, dist.group.WORLD)
    kept.barrier().wait()
    return "used"


def test_a_group_that_another_rank_made_is_refused(emptied: World) -> None:
    with pytest.raises(RankFailed, match=r"rank [01] used a process group of rank [01]: it is kept in a module"):
        emptied.run(uses_what_is_kept, ranks=2)


def test_a_group_of_an_earlier_run_is_refused(emptied: World) -> None:
    assert emptied.run(uses_what_is_kept, ranks=1) == ["used"]
    with pytest.raises(RankFailed, match="rank 0 used a process group of an earlier run's rank"):
        emptied.run(uses_what_is_kept, ranks=1)


def uneven_shards(context: RankContext) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, context.ranks // 2))
    seen = []
    for length in (3, 5):  # of which some ranks have less than others, or nothing
        rows = distribute_tensor(torch.arange(3.0 * length).reshape(length, 3), mesh, [Shard(0), Shard(0)])
        columns = rows.redistribute(mesh, [Shard(0), Shard(1)])
        whole = columns.redistribute(mesh, [Shard(0), Replicate()])
        seen += [one.to_local().tolist() for one in (rows, columns, whole)]
    return seen


@pytest.mark.long
def test_what_dtensor_remembers_of_a_mesh_is_a_ranks_own(simulated: World, world: World) -> None:
    real = world.run(uneven_shards, ranks=4)
    for simulated.seed in range(2):
        assert simulated.run(uneven_shards, ranks=4) == real


def loss_of_shards(context: RankContext) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (context.ranks,))
    scores = distribute_tensor(torch.arange(8.0).reshape(2, 4).requires_grad_(), mesh, [Shard(1)])
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor([1, 2]))
        loss.backward()
    return float(loss)


def test_a_mode_of_dtensors_is_a_ranks_own(simulated: World) -> None:
    """Whoever leaves it takes away what others still use, if they share it."""
    expected = float(torch.nn.functional.cross_entropy(torch.arange(8.0).reshape(2, 4), torch.tensor([1, 2])))
    for simulated.seed in range(3):
        assert simulated.run(loss_of_shards, ranks=2) == pytest.approx([expected] * 2)
