"""One process that is one rank: it joins its group once, then runs jobs until nobody gives it any."""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from pipeline import waiting
from validation.rank_report import Outcome, RankReport
from validation.shipping import pack, unpack

# The group never gives up by itself: whoever started the worker has the bound, and ends it from outside, which is
# the only thing that ends a wait inside gloo.
_GROUP_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class RankContext:
    """What a job knows about its place in the world.

    ``rank`` is 0..ranks-1, ``device`` is ``cpu`` or ``cuda:N``, ``group`` the process group of exactly these ranks.
    """

    rank: int
    ranks: int
    device: str
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Seat:
    """Where a worker sits: its rank, its device, and where it meets the others.

    ``store`` is ``file:///path`` or ``tcp://host:port/prefix``; ``folder`` receives the stacks that only a signal
    handler can write; ``environment`` replaces the worker's own, because a fork server's is as old as the server.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    device: str
    store: str
    folder: str
    environment: Mapping[str, str] = field(repr=False)

    @property
    def stacks(self) -> Path:
        """The file for stacks written by a signal handler."""
        return Path(self.folder, f"rank-{self.rank}.stacks")

    def rank_device(self) -> str:
        """``cpu`` or ``cuda:N``: ranks share the GPUs of their host in turn."""
        return "cpu" if self.device == "cpu" else f"cuda:{self.local_rank % torch.cuda.device_count()}"


@dataclass(frozen=True)
class Answer:
    """What a worker sends back: its report, and as bytes its result or the ValueError that ended it."""

    report: RankReport
    payload: bytes = b""

    @property
    def failed(self) -> bool:
        """Whether there is no result."""
        return self.report.outcome is not Outcome.FINISHED


def serve(orders: Connection, questions: Connection, seat: Seat) -> NoReturn:
    """Be the rank of this seat: join the group and say so, then answer each order with an answer, for ever."""
    _settle(seat)
    threading.Thread(target=_answer_questions, args=(questions,), daemon=True).start()
    contexts: list[RankContext] = []
    orders.send_bytes(pack(_attempt(seat.rank, lambda: contexts.append(_join(seat)))))
    try:
        while True:
            order = orders.recv_bytes()
            orders.send_bytes(pack(_attempt(seat.rank, lambda order=order: _obey(order, contexts[0]))))
    except (EOFError, OSError):
        os._exit(0)  # nobody is left to work for, and an orderly end could wait for other ranks


def _settle(seat: Seat) -> None:
    os.environ.clear()
    os.environ.update(seat.environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the controller decides
    stacks = seat.stacks.open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    torch.set_num_threads(1)
    if seat.device == "cuda":
        torch.cuda.set_device(seat.rank_device())


def _join(seat: Seat) -> RankContext:
    backend = "nccl" if seat.device == "cuda" and torch.cuda.device_count() >= seat.local_ranks else "gloo"
    dist.init_process_group(
        backend, store=_open_store(seat.store), rank=seat.rank, world_size=seat.ranks, timeout=_GROUP_TIMEOUT
    )
    group = dist.group.WORLD
    assert group is not None, "init_process_group returned without a default group"
    return RankContext(seat.rank, seat.ranks, seat.rank_device(), group)


def _open_store(address: str) -> dist.Store:
    url = urlsplit(address)
    if url.scheme == "file":
        return dist.FileStore(url.path)
    assert url.hostname and url.port, f"a store is file:///path or tcp://host:port/prefix, not {address}"
    tcp = dist.TCPStore(url.hostname, url.port, is_master=False, timeout=_GROUP_TIMEOUT, wait_for_workers=False)
    return dist.PrefixStore(url.path.strip("/"), tcp)


def _obey(order: bytes, context: RankContext) -> object:
    sys.path[:], job_and_arguments = unpack(order)  # the path first: the job may need it to be unpacked
    job, arguments = unpack(job_and_arguments)
    return job(context, *arguments)


def _attempt(rank: int, work: Callable[[], object]) -> Answer:
    try:
        result = work()
    except BaseException as error:  # also SystemExit and pytest's outcomes: the controller is the judge of all of them
        return _failure(rank, error)
    try:
        return Answer(RankReport(rank, Outcome.FINISHED, at_s=time.time()), pack(result))
    except Exception as error:  # no one type: an object that cannot be pickled raises what it likes
        message = f"TypeError: its result, a {type(result).__qualname__}, cannot be sent back: {error}"
        return Answer(RankReport(rank, Outcome.RAISED, message, at_s=time.time()))


def _failure(rank: int, error: BaseException) -> Answer:
    now_s = time.time()
    outcomes = sys.modules.get("_pytest.outcomes")
    if outcomes is not None and isinstance(error, outcomes.Skipped):
        return Answer(RankReport(rank, Outcome.SKIPPED, str(error), at_s=now_s))
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    told = traceback.TracebackException(type(error), error, trace)
    message = "".join(told.format_exception_only()).strip()
    report = RankReport(rank, Outcome.RAISED, message, "".join(told.format()), at_s=now_s)
    return Answer(report, _packed_cause(error))


def _packed_cause(error: BaseException) -> bytes:
    try:
        return pack(error) if isinstance(error, ValueError) else b""
    except Exception:  # the exception holds something that cannot travel; its text has been told
        return b""


def _answer_questions(questions: Connection) -> NoReturn:
    main = threading.main_thread().ident
    assert main is not None, "the main thread has started, or this one would not run"
    try:
        while True:
            questions.recv_bytes()
            questions.send_bytes(pack((_stack(main), waiting.current())))
    except (EOFError, OSError):
        os._exit(1)  # the controller is gone, and the main thread may be where only this can end it


def _stack(thread: int) -> str:
    frames = traceback.extract_stack(sys._current_frames()[thread])
    ours = [index for index, frame in enumerate(frames) if frame.filename == __file__]
    return "".join(traceback.format_list(frames[ours[-1] + 1 :] if ours else frames))
