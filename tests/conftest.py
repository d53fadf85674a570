"""What several test modules share."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from pipeproof.worlds.launcher import launch_environment
from tests.support.golden import COLLECTED, texts_of
from tests.support.typed import Typed
from tests.support.warm_start import Ended, WarmStart, run_new

if TYPE_CHECKING:
    from pipeproof.whitebox import WhiteBox
    from pipeproof.wings.simulated import SimulatedWorld
    from pipeproof.worlds.world import World

Launch = Callable[..., Ended]

_BOUND_S = 240.0
settings.register_profile("few", deadline=None, max_examples=40)  # how long one takes is the machine's affair
settings.register_profile("sweep", settings.get_profile("few"), max_examples=300)
settings.load_profile("few")
_STARTS_PROCESSES = {"warm_start", "torchrun", "python", "new_python", "processes"}  # fixtures

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small here: a second thread only waits, and takes a core
os.environ["COLUMNS"] = "160"  # of what is printed, whoever runs the tests: room for the widest table
sys.dont_write_bytecode = False  # or each process compiles the project anew, and pytest rewrites all its asserts
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_finish() -> None:
    """What lies there now stays: spare every later collection of garbage the walk over it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts processes like what uses ranks: ``ci/fast`` leaves both out.

    What does not share the ranks of a world has nothing to gain from running once on every rank of torchrun.
    """
    config.stash[COLLECTED] = list(items)
    variants = Counter[str]()
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None:
            test = item.nodeid.partition("[")[0]
            if variants[test] % mark.args[0]:
                item.add_marker("sweep")
            variants[test] += 1
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if _STARTS_PROCESSES & fixtures:
            item.add_marker("pipeproof_ranks")
        if "world" not in fixtures:
            item.add_marker("pipeproof_one_rank")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test may compare texts with those that are kept."""
    with texts_of(item):
        return (yield)


@pytest.fixture(scope="session")
def world(pipeproof_world: "World") -> "World":
    """Ours is the plugin's."""
    return pipeproof_world


@pytest.fixture(scope="session")
def here() -> "World":
    """A world of one rank, which is this process: nothing is started."""
    from tests.support.doubles import InThisProcess

    return InThisProcess()


@pytest.fixture
def whitebox_here(here: "World") -> "WhiteBox":
    """Judges steps of one rank."""
    from pipeproof.whitebox import WhiteBox

    return WhiteBox(here)


@pytest.fixture(scope="session")
def kept_simulated() -> Iterator["SimulatedWorld"]:
    """One process for all tests of simulated ranks."""
    from pipeproof.worlds.accelerator import too_old

    if why := too_old():
        pytest.skip(why)
    from pipeproof.wings.simulated import SimulatedWorld

    with SimulatedWorld(timeout_s=30.0, silent=True) as world:
        yield world


@pytest.fixture
def simulated(kept_simulated: "SimulatedWorld") -> "SimulatedWorld":
    """A simulated world with seed 0 and gloo's rules, until a test sets others."""
    from pipeproof.pipeline.transports import Transport
    from pipeproof.wings.simulated import Timing

    kept_simulated.seed, kept_simulated.transport = 0, Transport.UNLIMITED
    kept_simulated.room = 0
    kept_simulated.most, kept_simulated.explorations, kept_simulated.timing = None, [], Timing()
    kept_simulated.seeds = ()
    return kept_simulated


@pytest.fixture(scope="session")
def silent_ranks() -> Iterator["World"]:
    """As those of a command, but that they outlive it."""
    from pipeproof.worlds.world import World

    with World(silent=True, most_groups=100) as world:
        yield world


@pytest.fixture
def kept_ranks(silent_ranks: "World", monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this process run on ranks that are there: torch's tensor parallelism takes seconds to warm up."""
    from pipeproof.commands.campaign import Setting

    new = Setting.world

    def world(setting: Setting) -> AbstractContextManager["World"]:
        made = new(setting)
        if (made.kind, made.device, made._silent) != (silent_ranks.kind, silent_ranks.device, True):
            return made
        silent_ranks.timeout_s = made.timeout_s
        return nullcontext(silent_ranks)

    monkeypatch.setattr(Setting, "world", world)


@pytest.fixture(autouse=True)
def no_rank_of_torchrun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that runs on one rank only must not wait for the others, so it is not told that there are others."""
    if request.node.get_closest_marker("pipeproof_one_rank"):
        for name in os.environ.keys() - launch_environment().keys():
            monkeypatch.delenv(name)


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """Types command lines."""
    return Typed(capsys)


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as a rank of torchrun that is not the first, as far as its environment says."""
    for name, text in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, text)


@pytest.fixture(scope="session")
def warm_start() -> Iterator[WarmStart]:
    """Starts Python programs without the seconds that importing torch takes."""
    warm = WarmStart(_environment())
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def torchrun(warm_start: WarmStart) -> Launch:
    """Run as many ranks in a folder as ``torchrun --nproc-per-node`` would; their status and all output as one text.

    They have its environment, and a store that outlives them, as torchrun's own does.
    """

    def launch(folder: Path, *arguments: str, ranks: int, **variables: str) -> Ended:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        seats = [_seat(rank, ranks, store.port) | variables for rank in range(ranks)]
        done = warm_start.run(folder, arguments, seats, bound_s=_BOUND_S)
        del store
        return done

    return launch


@pytest.fixture(scope="session")
def python(warm_start: WarmStart) -> Launch:
    """Run ``python ARGUMENTS`` in a folder, with further variables; its status and all output as one text."""

    def launch(folder: Path, *arguments: str, **variables: str) -> Ended:
        return warm_start.run(folder, arguments, [_environment() | variables], bound_s=_BOUND_S)

    return launch


@pytest.fixture(scope="session")
def new_python() -> Launch:
    """As ``python``, with nothing imported before."""

    def launch(folder: Path, *arguments: str) -> Ended:
        return run_new(sys.executable, folder, arguments, _environment(), bound_s=_BOUND_S)

    return launch


def _seat(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives a rank."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    places |= {"GROUP_RANK": 0, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": ranks, "OMP_NUM_THREADS": 1}
    places |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    words = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return _environment() | {name: str(number) for name, number in places.items()} | words


def _environment() -> dict[str, str]:
    return {name: text for name, text in launch_environment().items() if not name.startswith("PYTEST_")}
