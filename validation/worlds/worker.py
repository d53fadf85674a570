"""Worker process for one rank: joins its group once, then runs jobs until its controller ends."""

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in __all__

from pipeproof.core.observe.posted_messages import find_awaited, is_ours, parting, progress
from pipeproof.core.observe.stack import stack_of
from pipeproof.pipeline import waiting
from pipeproof.worlds import accelerator, at_terminal
from pipeproof.worlds.launcher import Seat
from pipeproof.worlds.rank_report import Ending, RankReport
from pipeproof.worlds.settings import Settings
from pipeproof.worlds.shipping import pack, unpack_job

# The group never times out: the controller has the bound, and kills this process, the only way to end a wait inside
# gloo.
_GROUP_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class RankContext:
    """A job's place in the world.

    rank: 0..ranks-1. device: ``cpu`` or ``cuda:N``. group: the process group with exactly these ranks.
    """

    rank: int
    ranks: int
    device: str
    group: dist.ProcessGroup


def serve(orders: Connection, questions: Connection, seat: Seat, environment: Mapping[str, str]) -> NoReturn:
    """Serve a seat: join the group, report it, then answer orders for ever.

    ``environment`` replaces this process's own, which dates from the fork server's start.
    """
    os.environ.clear()
    os.environ.update(environment)
    _settle(seat)
    threading.Thread(target=_answer_questions, args=(questions,), daemon=True).start()
    context = functools.cache(functools.partial(_join, seat))
    orders.send_bytes(pack(attempt(seat.rank, lambda: bool(context()))))
    try:
        while True:
            report = attempt(seat.rank, functools.partial(obey, orders.recv_bytes(), context()))
            orders.send_bytes(pack(replace(report, left=dist.group.WORLD is not context().group)))
    except (EOFError, OSError):
        os._exit(0)  # no controller is left, and an orderly exit could wait for other ranks


def _settle(seat: Seat) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the controller decides
    try:
        stacks = seat.stacks.open("w")
    except FileNotFoundError:
        os._exit(0)  # the controller ended meanwhile, and removed the folder
    if seat.silent:
        with seat.output.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    faulthandler.enable(stacks, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    torch.set_num_threads(1)
    at_terminal.settle(seat.rank, seat.folder)


def _join(seat: Seat) -> RankContext:
    place = accelerator.place_of(seat.device, seat.local_rank)
    accelerator.use(place)
    share_gloo_device()
    backend, url = accelerator.backend_of(seat.device, seat.local_ranks), urlsplit(seat.store)
    store: Store
    if url.scheme == "file":
        store = FileStore(url.path)
    else:
        assert url.scheme == "tcp", f"a store is file:///path or tcp://host:port/prefix, not {seat.store}"
        host, _, port = url.netloc.rpartition(":")
        tcp = TCPStore(host, int(port), is_master=False, timeout=_GROUP_TIMEOUT, wait_for_workers=False)
        store = PrefixStore(url.path.strip("/"), tcp)
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.ranks, timeout=_GROUP_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None, "init_process_group returned without a default group"
    return RankContext(seat.rank, seat.ranks, place, group)


def obey(order: bytes, context: RankContext) -> object:
    """Run a rank's part of a packed job. Raises its errors. Process settings are restored."""
    job, arguments = unpack_job(order)
    kept, settings = _groups_of_jobs(), Settings()
    try:
        return job(context, *arguments)
    except Exception as error:  # user code may raise anything, possibly because of its own globals
        if isinstance(error, BdbQuit):
            error.args = (at_terminal.LEFT,)
        if kept:
            groups = f"{kept} process group{'s' * (kept > 1)} of earlier jobs still on this rank"
            error.add_note(
                f"{groups}: a test marked pipeproof_fresh_ranks, or World.close() before a run, has ranks without"
            )
        raise
    finally:
        settings.put_back()


def _groups_of_jobs() -> int:
    """Count process groups beside the default one; 0 if torch hides them."""
    groups = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", ())
    return max(0, len(groups) - 1)


def attempt(rank: int, work: Callable[[], object]) -> RankReport:
    """Run ``work`` on ``rank`` and report its ending and result."""
    parting()  # left by a failed job
    try:
        result = work()
    except BaseException as error:  # includes SystemExit and pytest's outcomes: the controller judges them all
        return _failure(rank, error)
    finally:
        at_terminal.finish_lines()
    try:
        made, groups = pack(result), _groups_of_jobs()
        return RankReport(rank, Ending.FINISHED, traceback=parting(), at_s=time.time(), payload=made, groups=groups)
    except Exception as error:  # any type: unpicklable objects raise anything
        message = f"TypeError: its result, a {type(result).__qualname__}, cannot be sent back: {error}"
        return RankReport(rank, Ending.RAISED, message, at_s=time.time())


def _failure(rank: int, error: BaseException) -> RankReport:
    now_s = time.time()
    outcomes = sys.modules.get("_pytest.outcomes")
    if outcomes is not None and isinstance(error, outcomes.Skipped):
        return RankReport(rank, Ending.SKIPPED, str(error), at_s=now_s)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame):
        trace = trace.tb_next
    formatted = traceback.TracebackException(type(error), error, trace)
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    message = "".join(formatted.format_exception_only()).strip()
    trace_text, payload = "".join(formatted.format()), b""
    with contextlib.suppress(Exception):  # it may hold something that cannot travel; its text is reported already
        payload = pack(error) if isinstance(error, ValueError) else b""
    return RankReport(rank, Ending.RAISED, message, trace_text, at_s=now_s, payload=payload, stack=stack_of(innermost))


def _is_ours(frame: FrameType) -> bool:
    """True for frames around user code, by pytest's own mark."""
    return frame.f_code.co_filename == __file__ or "__tracebackhide__" in frame.f_locals


def _answer_questions(questions: Connection) -> NoReturn:
    main = threading.main_thread().ident
    assert main is not None, "the main thread has started, or this one would not run"
    try:
        while True:
            questions.recv_bytes()
            frame = sys._current_frames()[main]
            own = waiting.current()
            wait, peers = (None, None) if own else find_awaited(main) or _collective(frame) or (None, None)
            report = RankReport(-1, Ending.STOPPED, waiting=own or wait, peers=peers, progress=progress())
            text = stack_text(traceback.extract_stack(frame))
            questions.send_bytes(pack(replace(report, traceback=text, stack=stack_of(frame))))  # -1: who asks knows
    except (EOFError, OSError):
        os._exit(1)  # the controller is gone, and the main thread may be stuck


def stack_text(frames: Sequence[traceback.FrameSummary]) -> str:
    """Format a stack from the job on."""
    ours = [index for index, frame in enumerate(frames) if frame.filename == __file__]
    own = [frame for frame in frames[ours[-1] + 1 if ours else 0 :] if not is_ours(frame.filename)]
    return "".join(traceback.format_list(own))


def _collective(innermost: FrameType) -> tuple[str, tuple[int, ...] | None] | None:
    """Describe the outermost call into torch.distributed, decorators excluded, with its ranks.

    For the group of all ranks the peers are empty; without a visible group they are None.
    """
    calls = [
        frame
        for frame, _ in traceback.walk_stack(innermost)
        if "torch/distributed/" in frame.f_code.co_filename and frame.f_code.co_name != "wrapper"
    ]
    if not calls:
        return None
    name = f"torch.distributed.{calls[-1].f_code.co_name}"
    named = [frame.f_locals["group"] for frame in reversed(calls) if "group" in frame.f_locals]
    group = next((one for one in named if isinstance(one, dist.ProcessGroup)), None)
    if group is None and not named and calls[-1].f_globals is not vars(dist.distributed_c10d):
        return name, None
    if group is None or group.size() == dist.get_world_size():
        return name, ()
    ranks = dist.get_process_group_ranks(group)
    others = tuple(one for one in ranks if one != dist.get_rank())
    return f"{name} of the group of ranks {', '.join(map(str, ranks))}", others


def share_gloo_device() -> None:
    """Share one device among all gloo groups that this process creates from now on."""
    if dist.is_gloo_available():
        gloo: Any = dist.ProcessGroupGloo
        own = gloo.__init__
        devices = functools.cache(_devices)

        @functools.wraps(own)
        def make(self: Any, store: Any, rank: int, size: int, *given: Any, **named: Any) -> Any:
            options = gloo._Options()
            apart = [name for name in named if name != "timeout" and not hasattr(options, name)]
            more = [*given]
            if len(more) == 1 and isinstance(more[0], timedelta) and "timeout" not in named:
                named["timeout"] = more.pop()
            if more or apart or not isinstance(named.get("timeout"), timedelta):  # not created as torch's groups are
                return own(self, store, rank, size, *more, **named)
            options._timeout, options._devices = named.pop("timeout"), [*devices()]
            options._threads = 2 * len(options._devices)
            for name, value in named.items():
                setattr(options, name, value)
            return own(self, store, rank, size, options)

        gloo.__init__ = make


def _devices() -> tuple[Any, ...]:
    """Return torch's own choice of devices: one per interface in the environment, or the host name's."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        return (dist.ProcessGroupGloo.create_default_device(),)
    return tuple(dist.ProcessGroupGloo.create_device(interface=one) for one in interfaces.split(","))
