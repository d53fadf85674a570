"""What a process keeps once is each simulated rank's own, also packages; what a rank takes of another's is refused."""

import contextlib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import attention
from torch.utils import checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.wings.simulated.own_state import OwnModules
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World


def in_its_environment(context: RankContext) -> list[str]:
    os.environ.setdefault("OF_THIS_RANK", str(context.rank))
    dist.barrier()
    names = "OF_THIS_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    return [os.environ[name] for name in names]


def test_the_environment_is_a_ranks_own_as_a_launcher_would_set_it(simulated: SimulatedWorld, world: World) -> None:
    real = world.run(in_its_environment, ranks=2)
    for simulated.seed in range(2):
        assert (
            simulated.run(in_its_environment, ranks=2) == real == [["0", "0", "0", "2", "2"], ["1", "1", "1", "2", "2"]]
        )


def noted_optimizers(context: RankContext) -> int:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    observed = []
    register_optimizer_step_post_hook(lambda optimizer, given, named: observed.append(optimizer))
    dist.barrier()
    weight = torch.nn.Parameter(torch.ones(1))
    torch.optim.SGD([weight], lr=0.1).step()
    dist.barrier()
    return len(observed)


def switched(context: RankContext) -> list[object]:
    """What people set for a block of code, as it is in the midst of one in which ranks take turns, and behind it."""
    first, observed = context.rank == 0, []
    with (
        torch.autograd.set_detect_anomaly(first),
        attention.sdpa_kernel(getattr(attention.SDPBackend, "FLASH_ATTENTION" if first else "MATH")),
        set_checkpoint_early_stop(first),
        torch.set_grad_enabled(first),
        torch.autocast("cpu", torch.bfloat16, enabled=not first),
        warnings.catch_warnings(record=True) as warned,
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        warnings.simplefilter("always" if first else "ignore")
        torch.set_float32_matmul_precision("high" if first else "highest")
        torch.use_deterministic_algorithms(first)
        torch.set_num_threads(1 + first)
        torch.set_default_dtype(torch.float64 if first else torch.float32)
        for _ in range(2):
            dist.barrier()
        sys.stdout.write(f"{context.rank}\n")
        warnings.warn("said", stacklevel=1)
        dist.barrier()
        observed += [torch.is_anomaly_enabled(), torch.backends.cuda.flash_sdp_enabled()]
        observed += [checkpoint._enable_checkpoint_early_stop, torch.get_float32_matmul_precision() == "high"]
        observed += [torch.are_deterministic_algorithms_enabled(), torch.get_num_threads() == 2]
        linear = torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
        observed += [torch.is_grad_enabled(), torch.get_default_dtype() is linear.dtype is torch.float64]
        observed += [linear.dtype is not torch.bfloat16]
    dist.barrier()
    return [observed, len(warned or ()), printed.getvalue(), torch.is_anomaly_enabled(), len(warnings.filters)]


def test_what_is_set_for_a_block_of_code_is_a_ranks_own_and_gone_after_a_run(simulated: SimulatedWorld) -> None:
    for simulated.seed in range(6):
        (*one, count), (*other, _) = simulated.run(switched, ranks=2)
        assert one == [[True] * 9, 1, "0\n", False]
        assert other == [[False] * 9, 0, "1\n", False]
        assert simulated.run(switched, ranks=1)[0] == [*one, count], "no run leaves any of it"


def with_newer_settings(context: RankContext) -> list[str]:
    """How products are rounded, told by one rank in a way that makes torch refuse to say it in the older one."""
    if context.rank == 0:
        torch.backends.fp32_precision = "tf32"  # type: ignore[assignment]
        torch.backends.mkldnn.conv.fp32_precision = "bf16"
    observed = []
    for _ in range(2):
        dist.barrier()
        observed += [torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision]
    return observed if context.rank == 0 else [*observed, torch.get_float32_matmul_precision()]


@pytest.fixture
def emptied(simulated: SimulatedWorld) -> Iterator[SimulatedWorld]:
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


def loss_of_shards(context: RankContext) -> bool:
    """A mode of DTensors: whoever leaves it takes away what others still use, if they share it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (context.ranks,))
    whole, targets = torch.arange(8.0).reshape(2, 4), torch.tensor([1, 2])
    scores = distribute_tensor(whole.clone().requires_grad_(), mesh, [Shard(1)])
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(scores, targets)
        loss.backward()
    return float(loss) == pytest.approx(float(torch.nn.functional.cross_entropy(whole, targets)))


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (noted_optimizers, [1, 1, 1]),
        (with_newer_settings, [["tf32", "bf16"] * 2, ["none", "none"] * 2 + ["highest"]]),
        (loss_of_shards, [True, True]),
    ],
)
def test_what_is_a_ranks_own(job: Any, expected: list[object], simulated: SimulatedWorld) -> None:
    for simulated.seed in range(4):
        assert simulated.run(job, ranks=len(expected)) == expected


PACKAGE = {
    "kept_engine/__init__.py": "",
    "kept_engine/state.py": """
import torch
rank, steps = None, []
def started(number):
    global rank
    assert rank is None, "started twice"
    rank = number
class Engine:
    pass
def marked(tensor):
    return rank
torch.Tensor.of_a_kept_engine = marked
""",
    "kept_users/__init__.py": "",
    "kept_users/job.py": "from kept_engine import state\ndef where(): return state\n",
    "kept_users/late.py": "from kept_engine.state import Engine\n",
}


@pytest.fixture
def engines(tmp_path: Path, simulated: SimulatedWorld, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedWorld]:
    """A world in which kept_engine can be imported, and is a rank's own."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    simulated.own_modules = frozenset({"kept_engine"})
    yield simulated
    simulated.own_modules = frozenset()
    simulated.close()  # so that it is in nobody's way there


def starts(context: RankContext, state: Any) -> list[object]:
    state.started(context.rank)
    dist.barrier()
    state.steps.append(context.rank)
    dist.barrier()
    import kept_engine.state

    return [kept_engine.state.rank, state.steps, torch.ones(1).of_a_kept_engine()]  # type: ignore[attr-defined]


@pytest.fixture
def state(engines: SimulatedWorld) -> Iterator[Any]:
    yield importlib.import_module("kept_engine.state")
    vars(torch.Tensor).get("of_a_kept_engine") and delattr(torch.Tensor, "of_a_kept_engine")
    for name in [one for one in sys.modules if one.startswith("kept_")]:
        del sys.modules[name]


def test_what_a_package_keeps_is_a_ranks_own(engines: SimulatedWorld, state: Any) -> None:
    expected = [[rank, [rank], rank] for rank in range(3)]
    for engines.seed in range(3):
        assert engines.run(starts, state, ranks=3) == expected, "also in the next run"


def test_it_is_shared_where_nobody_says_so(engines: SimulatedWorld, state: Any) -> None:
    engines.own_modules = frozenset()
    with pytest.raises(RankFailed, match="started twice"):
        engines.run(starts, state, ranks=2)


def starts_by_way_of(context: RankContext, where: Any) -> int:
    where().started(context.rank)
    dist.barrier()
    return int(where().rank)


def test_who_has_something_of_it_is_imported_anew_with_it(engines: SimulatedWorld, state: Any) -> None:
    where = importlib.import_module("kept_users.job").where
    assert engines.run(starts_by_way_of, where, ranks=2) == [0, 1]


def imports_late(context: RankContext, name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize(
    ("before", "name", "said"),
    [
        (True, "kept_users.late", r"kept_users.late.Engine is of kept_engine.state, which each simulated rank"),
        (False, "kept_engine.state", r"Tensor.of_a_kept_engine is of kept_engine.state, .*: import kept_engine"),
    ],
)
def test_imports_in_the_midst_are_refused(
    before: bool, name: str, said: str, engines: SimulatedWorld, request: Any
) -> None:
    if before:
        engines.run(starts, request.getfixturevalue("state"), ranks=1)
    with pytest.raises(RankFailed, match=said):
        engines.run(imports_late, name, ranks=2)


def test_without_packages_there_is_nothing_to_swap() -> None:
    assert OwnModules((), {}).here() == {}
