"""The Chrome trace's structure, as Perfetto needs it: a checker of documents, which is shown broken ones."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import Any

import pytest

from pipeproof.pipeline import Kind, build, lower, simulate
from pipeproof.pipeline.action import SENDS
from pipeproof.pipeline.chrome_trace import COLOURS, chrome_trace
from pipeproof.pipeline.costs import Costs, predict, trace_of
from pipeproof.pipeline.schedules import FAMILIES, virtuals
from pipeproof.pipeline.trace import Trace
from tests.pipeline.test_trace import TRACE
from tests.support.golden import golden

Document = dict[str, Any]
COSTS = Costs({(stage, kind): 1e-3 / 3 for stage in range(8) for kind in Kind}, {(0, 1): 1e-4 / 7})


def faults(document: Document) -> Iterator[str]:
    """What keeps a viewer from showing ``document`` as it is meant."""
    events = document["traceEvents"]
    timed = [event for event in events if event["ph"] != "M"]
    slices = [event for event in timed if event["ph"] == "X"]
    named = {(e["pid"], e.get("tid")) for e in events if e["ph"] == "M"}
    for one, other in pairwise(timed):
        if other["ts"] < one["ts"]:
            yield f"{other['name']} is out of order"
    threads = sorted(slices, key=lambda event: (event["pid"], event["tid"]))
    for thread, held in groupby(threads, key=lambda event: (event["pid"], event["tid"])):
        if thread not in named:
            yield f"thread {thread} has no name"
        for one, other in pairwise(held):
            if nanoseconds(one["ts"]) + nanoseconds(one["dur"]) > nanoseconds(other["ts"]):
                yield f"{other['name']} begins before {one['name']} has ended"
    for event in slices:
        if not event["dur"] > 0:
            yield f"{event['name']} lasts {event['dur']}"
    yield from arrow_faults([event for event in timed if event["ph"] in "sf"], slices)


def arrow_faults(ends: list[Document], slices: list[Document]) -> Iterator[str]:
    by_id: dict[int, list[Document]] = {}
    for event in ends:
        by_id.setdefault(event["id"], []).append(event)
    for number, pair in by_id.items():
        if sorted(event["ph"] for event in pair) != ["f", "s"]:
            yield f"arrow {number} has not one start and one finish"
            continue
        start, finish = sorted(pair, key=lambda event: event["ph"], reverse=True)
        if (start["name"], start["cat"]) != (finish["name"], finish["cat"]) or finish.get("bp") != "e":
            yield f"the ends of arrow {number} do not match"
        if finish["ts"] < start["ts"]:
            yield f"arrow {number} goes back in time"
        for end in pair:
            there = [each for each in slices if (each["pid"], each["tid"]) == (end["pid"], end["tid"])]
            if not any(each["ts"] <= end["ts"] < each["ts"] + each["dur"] for each in there):
                yield f"arrow {number} hangs in the air"


def nanoseconds(us: float) -> int:
    """As viewers do: what is not whole is cut off."""
    return int(us * 1000)


def built(name: str) -> dict[str, Trace]:
    schedule = build(name, ranks=4, microbatches=8, virtual=virtuals(name, looped=2))
    return {"on paper": trace_of(simulate(schedule)), "in seconds": predict(schedule, COSTS)}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_trace_is_whole_and_has_an_arrow_for_every_message(name: str) -> None:
    traces = built(name)
    document = json.loads(json.dumps(chrome_trace(traces)))
    assert list(faults(document)) == []
    sends = [str(a) for row in lower(traces["on paper"].schedule).ranks for a in row if a.kind in SENDS]
    for process in (0, 1):
        starts = [e["name"] for e in document["traceEvents"] if e["ph"] == "s" and e["pid"] == process]
        assert sorted(starts) == sorted(sends)


def test_ranks_are_threads_and_microbatches_colours() -> None:
    events: list[Document] = chrome_trace(built("1f1b"))["traceEvents"]  # type: ignore[assignment]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert names == ["rank 0", "rank 1", "rank 2", "rank 3"]
    for event in events:
        if event.get("cat") == "compute":
            assert event["tid"] == event["args"]["stage"]  # of 1f1b
            assert event["cname"] == COLOURS[event["args"]["microbatch"]]


def perfetto(name: str) -> tuple[int, int]:
    """The hue, in degrees, and the lightness, in percent, that Perfetto gives a slice of this name."""
    seed = re.sub(r" ?\d+", "", name)
    return fnv(seed, 360), fnv(f"{seed}x", 40) + 40


def fnv(text: str, most: int) -> int:
    """JavaScript's arithmetic: a product is a float, and what is kept of it a signed 32-bit number."""
    found = 0x811C9DC5 & 0xFFFFFFF
    for letter in text:
        found = signed(int(float(signed(found ^ ord(letter))) * 16777619.0))
    return abs(found) % most


def signed(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def apart(one: str, other: str) -> float:
    """How far two names' colours are apart: degrees of hue, and over half of the difference of lightness."""
    (hue, light), (hue_2, light_2) = perfetto(one), perfetto(other)
    turn = abs(hue - hue_2)
    return min(turn, 360 - turn) + 0.6 * abs(light - light_2)


def test_perfetto_gives_kinds_and_microbatches_colours_of_their_own() -> None:
    traces = {name: built(name)["on paper"] for name in ("zb-h1", "1f1b")}
    events: list[Document] = chrome_trace(traces)["traceEvents"]  # type: ignore[assignment]
    names: dict[tuple[str, int], set[str]] = {}
    for event in events:
        if event.get("cat") == "compute":
            names.setdefault((event["args"]["kind"], event["args"]["microbatch"]), set()).add(event["name"])
    assert len(names) == 4 * 8
    for (kind, microbatch), same in names.items():
        assert len(set(map(perfetto, same))) == 1, "stages do not matter"
        name = min(same)
        for (other_kind, other), others in names.items():
            if (kind, microbatch) != (other_kind, other) and (other == microbatch or other_kind == kind):
                least = 30 if abs(other - microbatch) == 1 else 15
                assert apart(name, min(others)) >= least, (name, min(others))


def test_a_wait_is_a_slice_of_its_own_and_the_arrow_goes_to_the_work() -> None:
    events: list[Document] = chrome_trace({"measured": TRACE})["traceEvents"]  # type: ignore[assignment]
    observed = [(e["ph"], e["name"], e["ts"], e.get("dur")) for e in events if e["ph"] != "M" and e["tid"] == 1]
    golden("\n".join(map(str, observed)))


def broken(change: Callable[[Any], None]) -> list[str]:
    document = copy.deepcopy(chrome_trace({"measured": TRACE}))
    change(document["traceEvents"])
    return list(faults(document))


def of(events: list[Document], phase: str) -> Document:
    return next(event for event in events if event["ph"] == phase)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda events: events.reverse(), "out of order"),
        (lambda events: of(events, "X").update(dur=9e6), "begins before"),
        (lambda events: of(events, "X").update(dur=0), "lasts 0"),
        (lambda events: of(events, "X").update(tid=9), "has no name"),
        (lambda events: events.remove(of(events, "f")), "has not one start and one finish"),
        (lambda events: of(events, "f").update(name="else"), "do not match"),
        (lambda events: of(events, "f").pop("bp"), "do not match"),
        (lambda events: of(events, "s").update(ts=9e6), "goes back in time"),
        (lambda events: of(events, "s").update(ts=1e6), "hangs in the air"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_trace_is_noticed(change: Callable[[Any], None], complaint: str) -> None:
    assert any(complaint in fault for fault in broken(change))
    assert broken(lambda events: None) == []
