"""Packages that are imported anew on each simulated rank: what they keep and what they replace is that rank's own."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.simulated.own_modules import OwnModules
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

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
def engines(tmp_path: Path, simulated: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
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
def state(engines: World) -> Iterator[Any]:
    yield importlib.import_module("kept_engine.state")
    vars(torch.Tensor).get("of_a_kept_engine") and delattr(torch.Tensor, "of_a_kept_engine")
    for name in [one for one in sys.modules if one.startswith("kept_")]:
        del sys.modules[name]


def test_what_a_package_keeps_is_a_ranks_own(engines: World, state: Any) -> None:
    expected = [[rank, [rank], rank] for rank in range(3)]
    for engines.seed in range(3):
        assert engines.run(starts, state, ranks=3) == expected, "also in the next run"


def test_it_is_shared_where_nobody_says_so(engines: World, state: Any) -> None:
    engines.own_modules = frozenset()
    with pytest.raises(RankFailed, match="started twice"):
        engines.run(starts, state, ranks=2)


def starts_by_way_of(context: RankContext, where: Any) -> int:
    where().started(context.rank)
    dist.barrier()
    return int(where().rank)


def test_who_has_something_of_it_is_imported_anew_with_it(engines: World, state: Any) -> None:
    where = importlib.import_module("kept_users.job").where
    assert engines.run(starts_by_way_of, where, ranks=2) == [0, 1]


def imports_late(context: RankContext, name: str) -> None:
    importlib.import_module(name)


def test_who_takes_something_of_it_in_the_midst_is_refused(engines: World, state: Any) -> None:
    engines.run(starts, state, ranks=1)
    with pytest.raises(RankFailed, match=r"kept_users.late.Engine is of kept_engine.state, which each simulated rank"):
        engines.run(imports_late, "kept_users.late", ranks=2)


def test_what_replaces_something_of_torchs_in_the_midst_is_refused(engines: World) -> None:
    with pytest.raises(RankFailed, match=r"Tensor.of_a_kept_engine is of kept_engine.state, .*: import kept_engine"):
        engines.run(imports_late, "kept_engine.state", ranks=2)


def test_without_packages_there_is_nothing_to_swap() -> None:
    assert OwnModules(()).here() == {}
