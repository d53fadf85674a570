"""Read executed schedules from traces in Chrome's format: torch's profiler, a file for each rank, or our own.

torch's runtime of several stages a rank (``_PipelineScheduleRuntime``) marks each action that it runs, reductions among
them, as ``PP:0F0``. The profiler's marks, ``ProfilerStep#3``, separate steps; without them, equal counts of each action
do. Ours come from ``show --run --trace``, a thread for each rank.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.cells import Cells, cells_of
from pipeproof.pipeline.files import read_json
from pipeproof.pipeline.mesh import Groups
from pipeproof.pipeline.program import Program, parse_cells
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.sizes import shorten

_MARK, _STEP = "PP:", "ProfilerStep#"
_WANTED = "a trace of torch's profiler with actions such as PP:0F0, or one that show --run --trace writes"
_ACTIONS = ("compute", "communication")  # the categories of our own
_MESH = "mesh_"  # and an axis: how groups of a mesh are called
_LATEST = 1e18  # microseconds
_OTHER_END = {Kind.SEND_F: 1, Kind.RECV_B: 1, Kind.SEND_B: -1, Kind.RECV_F: -1}  # of a message, from its stage

Event = Mapping[str, Any]
Row = list[tuple[str, str]]  # of a rank, the step and the text of each action, in the order in which they began


def is_trace(name: str | Path) -> bool:
    """True if ``name`` means a trace, not a schedule."""
    return Path(name).suffix.lower() == ".json"


@dataclass(frozen=True)
class Ran:
    """Steps found in traces, equal ones once, and the number of ranks.

    ``groups``: by axis name, a job's groups along it, as ``init_device_mesh`` names them.
    """

    steps: Sequence[Schedule | Program]
    ranks: int
    groups: Mapping[str, Groups]


def read_traces(paths: Sequence[str], *, pipelines: Groups = ()) -> Ran:
    """Read the files at ``paths``, one for each rank, or all ranks in one.

    ``pipelines``: ranks of each, if several; else all ranks form one. Raises ``ScheduleError`` for an incomplete
    pipeline.
    """
    rows: dict[int, Row] = {}
    groups: dict[str, dict[tuple[int, ...], None]] = defaultdict(dict)
    for path in paths:
        data = read_json(path, expected=_WANTED, once=False)
        for rank, row in _rows(path, data, len(rows)):
            if rank in rows:
                raise ScheduleError(f"{path} is of rank {rank}, as a file before it is: give each rank's trace once")
            rows[rank] = row
        for axis, group in _groups(data):
            groups[axis][group] = None
    name = Path(paths[0]).name
    whole = _pipelines(rows, pipelines)
    alike = defaultdict[Cells, dict[str, list[str]]](dict)
    try:
        for ranks in whole:
            for step, lines in _steps([rows[rank] for rank in ranks]).items():
                alike[_whole(cells_of(lines), ranks)].setdefault(", ".join(map(str, ranks)), []).append(step)
        steps = [parse_cells(one, name=f"{name}{_describe_steps(of, len(whole) > 1)}") for one, of in alike.items()]
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None
    return Ran(steps, len(rows), {axis: tuple(found) for axis, found in groups.items()})


def _pipelines(rows: Mapping[int, Row], pipelines: Groups) -> Groups:
    """Ranks of each pipeline in the files."""
    if not pipelines or len(rows) <= len(pipelines[0]):
        return (tuple(sorted(rows)),)
    for group in pipelines:
        traced = [rank for rank in group if rank in rows]
        if lost := [rank for rank in group if rank not in rows] if traced else []:
            raise ScheduleError(f"rank {lost[0]} has no trace, but rank {traced[0]} of its pipeline has: give both")
    if strange := sorted({*rows} - {rank for group in pipelines for rank in group}):
        raise ScheduleError(f"a trace is of rank {strange[0]}, which the mesh does not have: give it all axes")
    return tuple(group for group in pipelines if group[0] in rows)


def _describe_steps(steps: Mapping[str, Sequence[str]], several: bool) -> str:
    """Name steps and pipelines; nothing for a single one."""
    texts = []
    for ranks, of in steps.items():
        step = f"step{'s' * (len(of) > 1)} {', '.join(of)}" if of != [""] else ""
        texts.append(" ".join(filter(None, (f"ranks {ranks}" if several else "", step))))
    every = "; ".join(filter(None, texts))
    return (", " if every else "") + shorten(every)


def _groups(data: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Mesh groups noted by torch's profiler, each with its axis; other groups are skipped."""
    said = data.get("distributedInfo")
    configs = said.get("pg_config") if isinstance(said, dict) else None
    for one in configs if isinstance(configs, list) else ():
        found, ranks = (one.get("pg_desc"), one.get("ranks")) if isinstance(one, dict) else (None, None)
        if isinstance(found, str) and found.startswith(_MESH) and isinstance(ranks, list):
            if all(type(rank) is int and rank >= 0 for rank in ranks):
                yield found[len(_MESH) :], tuple(ranks)


def _rows(path: str, data: Mapping[str, Any], known: int) -> Iterator[tuple[int, Row]]:
    """Ranks and rows in a file."""
    events = data.get("traceEvents")
    if not isinstance(events, list):
        raise ScheduleError(f"{path} has no traceEvents: expected {_WANTED}")
    slices = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    try:
        found = dict(_of_ours(events, slices)) if "distributedInfo" not in data else {}
        found = found or dict(_of_torch(data, slices, known))
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ScheduleError(f"{path} has events that are not as they are written: expected {_WANTED}") from None
    if not found:
        why = "torch's GPipe and 1F1B mark no stages, its schedules for several stages of a rank do"
        raise ScheduleError(f"{path} has no action: expected {_WANTED} ({why})")
    yield from found.items()


def _of_torch(data: Mapping[str, Any], slices: Sequence[Event], known: int) -> Iterator[tuple[int, Row]]:
    """One rank's actions, each with its profiler step; actions outside all steps are left out."""
    said = [event for event in slices if event.get("cat") == "user_annotation"]  # a GPU's own have another category
    marks = [(*_time(one), one["name"][len(_STEP) :]) for one in said if _is(one, _STEP)]
    row: Row = []
    for event in _in_time(one for one in said if _is(one, _MARK)):
        at, _ = _time(event)
        steps = [step for began, lasted, step in marks if began <= at < began + lasted]
        if steps or not marks:
            row.append((steps[0] if steps else "", event["name"][len(_MARK) :]))
    if row:
        yield int(data.get("distributedInfo", {}).get("rank", known)), row


def _in_time(events: Iterable[Event]) -> list[Event]:
    """Sort ``events`` by start; ties keep file order."""
    return sorted(events, key=lambda event: _time(event)[0])


def _time(event: Event) -> tuple[float, float]:
    """An event's start and duration, in microseconds."""
    for part, least in (("ts", -_LATEST), ("dur", 0)):
        found = event.get(part)
        if not isinstance(found, int | float) or isinstance(found, bool) or not least <= found <= _LATEST:
            wanted = "a finite number" if part == "ts" else "a finite number, at least 0"
            raise ScheduleError(f"the event {event['name']!r} has {part} {json.dumps(found)}: expected {wanted}")
    return event["ts"], event["dur"]


def _is(event: Event, mark: str) -> bool:
    return str(event["name"]).startswith(mark)


def _of_ours(events: Sequence[Event], slices: Sequence[Event]) -> Iterator[tuple[int, Row]]:
    """Each rank's actions in a measured trace."""
    measured = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and str(event["args"]["name"]).endswith(", measured")
    }
    rows = defaultdict[int, Row](list)
    actions = (one for one in slices if one.get("pid") in measured and one.get("cat") in _ACTIONS)
    for event in _in_time(actions):
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
    parts = ([row[len(row) * k // many : len(row) * (k + 1) // many] for row in texts] for k in range(many))
    return {str(k) if many > 1 else "": part for k, part in enumerate(parts)}


def _whole(cells: Cells, ranks: Sequence[int]) -> Cells:
    """Return ``cells`` if each stage has one rank, and each message's other end a known stage."""
    has: dict[int, int] = {}
    for rank, row in zip(ranks, cells.rows, strict=True):
        for stage in {action.stage for action in row}:
            if (other := has.setdefault(stage, rank)) != rank:
                cure = "give the traces of one pipeline, or --mesh with all axes in their order"
                raise ScheduleError(f"ranks {other} and {rank} both have stage {stage}: {cure}")
    for action in (action for row in cells.rows for action in row):
        stage = action.stage + _OTHER_END.get(action.kind, 0)
        if stage not in has:
            text = f"{action} meets stage {stage}, of which no trace tells"
            raise ScheduleError(f"{text}: give those of all ranks of the pipeline")
    return cells
