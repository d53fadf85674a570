"""What ran, read from traces in Chrome's format: those of torch's profiler, a file for each rank, or one of our own.

torch's runtime of several stages a rank (``_PipelineScheduleRuntime``) marks each action that it runs, reductions among
them, as ``PP:0F0``. Steps are told apart by the profiler's marks, ``ProfilerStep#3``. Without them, where each action
is there equally often, by that. Ours are what ``show --run --trace`` writes, a thread for each rank.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.cells import Cells, cells_of
from pipeproof.pipeline.files import read_json
from pipeproof.pipeline.lower import Program, planned
from pipeproof.pipeline.schedule import Schedule, ScheduleError

_MARK, _STEP = "PP:", "ProfilerStep#"
_WANTED = "a trace of torch's profiler with actions such as PP:0F0, or one that show --run --trace writes"
_AFTER = (Kind.SEND_F, Kind.RECV_B)  # the other end is the stage after

Event = Mapping[str, Any]
Row = list[tuple[str, str]]  # of a rank, the step and the text of each action, in the order in which they began


def is_trace(name: str | Path) -> bool:
    """Whether ``name`` means a trace, not a schedule."""
    return Path(name).suffix.lower() == ".json"


def read_traces(paths: Sequence[str]) -> list[Schedule | Program]:
    """The steps that the files at ``paths`` tell of: one for each rank of a pipeline, or all ranks in one.

    Steps that ran alike are one. Raises ``ScheduleError`` for what tells no whole pipeline.
    """
    rows: dict[int, Row] = {}
    for path in paths:
        for rank, row in _rows(path, len(rows)):
            if rank in rows:
                raise ScheduleError(f"{path} is of rank {rank}, as a file before it is: give each rank's trace once")
            rows[rank] = row
    name = Path(paths[0]).name
    steps = _steps([rows[rank] for rank in sorted(rows)])
    try:
        alike = defaultdict[Cells, list[str]](list)
        for step, lines in steps.items():
            alike[_whole(cells_of(lines))].append(step)
        named = [(one, f"step{'s' * (len(of) > 1)} {', '.join(of)}") for one, of in alike.items()]
        return [planned(one, name=f"{name}, {said}" if len(steps) > 1 else name) for one, said in named]
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None


def _rows(path: str, known: int) -> Iterator[tuple[int, Row]]:
    """The ranks that a file tells of."""
    data = read_json(path, expected=_WANTED, once=False)
    events = data.get("traceEvents")
    if not isinstance(events, list):
        raise ScheduleError(f"{path} has no traceEvents: expected {_WANTED}")
    slices = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    try:
        found = dict(_of_ours(events, slices)) if "distributedInfo" not in data else {}
        found = found or dict(_of_torch(data, slices, known))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ScheduleError(f"{path} has events that are not as they are written: expected {_WANTED}") from None
    if not found:
        why = "torch's GPipe and 1F1B mark no stages, its schedules for several stages of a rank do"
        raise ScheduleError(f"{path} has no action: expected {_WANTED} ({why})")
    yield from found.items()


def _of_torch(data: Mapping[str, Any], slices: Sequence[Event], known: int) -> Iterator[tuple[int, Row]]:
    """One rank's actions, each with the profiler's step in which it began; what is outside of all steps is left out."""
    said = [event for event in slices if event.get("cat") == "user_annotation"]  # a GPU's own have another category
    marks = [(float(one["ts"]), float(one["dur"]), one["name"][len(_STEP) :]) for one in said if _is(one, _STEP)]
    row: Row = []
    for event in sorted((one for one in said if _is(one, _MARK)), key=lambda one: float(one["ts"])):
        at = float(event["ts"])
        steps = [step for began, lasted, step in marks if began <= at < began + lasted]
        if steps or not marks:
            row.append((steps[0] if steps else "", event["name"][len(_MARK) :]))
    if row:
        yield int(data.get("distributedInfo", {}).get("rank", known)), row


def _is(event: Event, mark: str) -> bool:
    return str(event["name"]).startswith(mark)


def _of_ours(events: Sequence[Event], slices: Sequence[Event]) -> Iterator[tuple[int, Row]]:
    """Each rank's actions in what was measured."""
    measured = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and str(event["args"]["name"]).endswith(", measured")
    }
    rows = defaultdict[int, Row](list)
    for event in slices:
        if event.get("pid") in measured and event.get("cat") in ("compute", "communication"):
            rows[int(event["tid"])].append(("", str(event["name"]).partition(" ")[0]))
    yield from rows.items()


def _steps(rows: Sequence[Row]) -> dict[str, list[list[str]]]:
    """By step, each rank's actions."""
    marked = list(dict.fromkeys(step for row in rows for step, _ in row))
    if marked != [""]:
        return {step: [[text for mine, text in row if mine == step] for row in rows] for step in marked}
    texts = [[text for _, text in row] for row in rows]
    counts = {count for row in texts for count in Counter(row).values()}
    many = counts.pop() if len(counts) == 1 else 1
    return {str(k): [row[len(row) * k // many : len(row) * (k + 1) // many] for row in texts] for k in range(many)}


def _whole(cells: Cells) -> Cells:
    """``cells`` themselves, if each message's other end is of a stage that a rank has."""
    has = {action.stage for row in cells.rows for action in row}
    for action in (action for row in cells.rows for action in row):
        other = _other_end(action)
        if other not in has:
            told = f"{action} meets stage {other}, of which no trace tells"
            raise ScheduleError(f"{told}: give those of all ranks of the pipeline")
    return cells


def _other_end(action: Action) -> int:
    if action.kind in _AFTER:
        return action.stage + 1
    return action.stage - 1 if action.kind in (Kind.SEND_B, Kind.RECV_F) else action.stage
