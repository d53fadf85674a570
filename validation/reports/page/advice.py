"""Advice as a page: where to begin, memory before and after each step of the way, and the fastest layouts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeproof.pipeline.layouts.cluster import GIB, Cluster
from pipeproof.pipeline.layouts.footprint import Footprint
from pipeproof.pipeline.layouts.layout import Job, Layout, Recompute
from pipeproof.pipeline.layouts.path import Outcome, Step
from pipeproof.pipeline.layouts.search import Choice
from pipeproof.pipeline.sizes import some, three_digits
from pipeproof.reports.page.markup import Html, Part, facts, framed, joined, section, table, tag, typed

_PARTS = ("weights", "gradients", "optimizer", "activations")
_BADGES = {Outcome.TAKEN: "pass", Outcome.NOT_ENOUGH: "unknown", Outcome.NOT_NEEDED: "not-applicable"}
_LEFT, _WIDTH, _RIGHT, _BAR, _ROW = 190, 560, 150, 13, 46  # of the picture, in its own units
_SCALE = 1.6  # devices that its axis is long
_AGAIN = {
    Recompute.NONE: "Nothing is computed again",
    Recompute.SELECTIVE: "Norms and activation functions are computed again",
    Recompute.FULL: "Every layer is computed again from its input",
}
_ZERO = {
    0: "each holds weights, gradients and optimizer whole",
    1: "each holds a share of the optimizer",
    2: "each holds a share of the optimizer and of the gradients",
    3: "each holds a share of the optimizer, the gradients and the weights",
}
_SAID = {
    "tp": "hidden states inside layers (tp)",
    "cp": "keys and values (cp)",
    "ep": "tokens on their way to experts (ep)",
    "dp": "gradients and weights of replicas (dp)",
    "pp": "what stages hand on (pp)",
}


@dataclass(frozen=True)
class Advice:
    """What was found for ``job`` on ``cluster``: the way, the fastest layouts, and how it ends.

    ``asked`` is the question in lines. ``said``: where to begin. ``do`` and ``line``: what to do next, and what to type
    for that; both may be empty.
    ``room``: the share of memory that may be filled.
    """

    job: Job
    cluster: Cluster
    steps: tuple[Step, ...]
    best: tuple[Choice, ...]
    asked: Sequence[str]
    said: str
    do: str
    line: str
    room: float


def advice_page(advice: Advice) -> str:
    """The page."""
    badge = tag("span", "fits" if advice.best else "nothing fits", class_=f"badge {'pass' if advice.best else 'fail'}")
    head = [
        tag("p", badge, tag("span", f" {advice.asked[0]}", class_="quiet")),
        tag("h1", advice.said, class_="said"),
        *(tag("p", line, class_="quiet") for line in advice.asked[1:]),
        tag("p", advice.do) if advice.do else None,
        typed(advice.line, named="the line to type") if advice.line else None,
    ]
    layouts = [_layout(choice, advice, number) for number, choice in enumerate(advice.best, 1)]
    body = [section("Memory of the fullest device", _picture(advice), wide=True), _path(advice), *layouts]
    return framed(
        f"{advice.job.model.name}: {advice.said.rstrip('.')}", joined([tag("header", *head), tag("main", *body)]), {}
    )


def _path(advice: Advice) -> Html:
    rows = [_row(step, before) for step, before in _before(advice.steps)]
    head = ["add", "", "GiB before", "GiB after", "seconds", "layout", "because"]
    caption = "One kind of parallelism at a time; what is not enough stays, for the next step builds on it"
    return section("The way", table(head, rows, caption=caption, numbers=(2, 3, 4)), wide=True)


def _before(steps: Sequence[Step]) -> Iterator[tuple[Step, Choice | None]]:
    """Every step, with the layout that it builds on."""
    last: Choice | None = None
    for step in steps:
        yield step, last
        if step.choice is not None and step.outcome is not Outcome.NOT_NEEDED:
            last = step.choice


def _row(step: Step, before: Choice | None) -> list[Part]:
    outcome = tag("span", step.outcome, class_=f"outcome {_BADGES[step.outcome]}")
    after = step.choice
    held = ["-" if one is None else _gib(one.footprint.total) for one in (before, after)]
    rest = ["-", "-"] if after is None else [three_digits(after.time.total), after.layout.words]
    return [step.name, outcome, *held, *rest, step.reason]


def _picture(advice: Advice) -> Html:
    """Two bars for each step that has a layout: what a device held before it, and what it holds with it."""
    memory = advice.cluster.device.memory
    shown = [(step, before) for step, before in _before(advice.steps) if step.choice is not None]
    height = _ROW * len(shown) + 30
    inside: list[Html] = []
    for number, (step, before) in enumerate(shown):
        assert step.choice is not None, "steps without a layout are not drawn"
        top = 24 + number * _ROW
        inside.append(tag("text", step.name, x=0, y=top + 12))
        inside.append(tag("text", step.outcome, x=0, y=top + 28, class_="quiet"))
        if before is not None:
            inside += _bar(before.footprint, memory, top, "before")
        inside += _bar(step.choice.footprint, memory, top + _BAR + 3, "after")
    inside += _line(memory * advice.room, memory, height, "room", "")
    inside += _line(memory, memory, height, "most", f"{_gib(memory)} GiB")
    said = f"Memory before and after each of {some(len(shown), 'step')}, beside the {_gib(memory)} GiB of a device"
    size = f"0 0 {_LEFT + _WIDTH + _RIGHT} {height}"
    drawn = tag("svg", *inside, viewBox=size, role="img", aria_label=said, class_="bars")
    keys = [joined([tag("span", class_=f"key {part}"), f" {part}"]) for part in _PARTS]
    legend = tag("p", *(tag("span", key) for key in keys), class_="legend")
    told = (
        f"Pale: before the step. The line is what a device has; {advice.room:.0%}, dashed, may be filled. A bar that "
        "reaches the right edge is longer than is drawn: there its parts are shares of it."
    )
    scrolled = tag("div", drawn, class_="wide", tabindex="0", role="region", aria_label="The picture of memory")
    return tag("figure", legend, scrolled, tag("figcaption", told))


def _line(at: float, memory: float, height: int, class_: str, says: str) -> Iterator[Html]:
    x = _LEFT + _WIDTH * at / (_SCALE * memory)
    yield tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=16, y2=height, class_=class_)
    if says:
        yield tag("text", says, x=f"{x + 4:.1f}", y=12, class_="quiet")


def _bar(held: Footprint, memory: float, top: int, class_: str) -> Iterator[Html]:
    """The four parts side by side; of a bar that is too long its whole width is all of it."""
    long = max(_SCALE * memory, held.total)
    left = float(_LEFT)
    for part in _PARTS:
        size = getattr(held, part)
        width = _WIDTH * size / long
        says = tag("title", f"{part}: {_gib(size)} GiB {class_} the step")
        box = {"x": f"{left:.1f}", "y": top, "width": f"{width:.1f}", "height": _BAR}
        yield tag("rect", says, **box, class_=f"{part} {class_}")
        left += width
    over = "over" if held.total > memory else None
    yield tag("text", f"{_gib(held.total)} GiB", x=f"{left + 5:.1f}", y=top + 11, class_=over)


def _layout(choice: Choice, advice: Advice, number: int) -> Html:
    """A layout, and a sentence for each of its figures."""
    layout, time = choice.layout, choice.time
    rows: list[tuple[str, Part]] = [
        ("Ranks", _ranks(layout, advice.job)),
        ("Memory", _memory(choice, advice)),
        ("Bubble", _bubble(choice, advice.job)),
        ("Communication", _communication(choice)),
        ("Time", f"{three_digits(time.total)} s a step, {time.compute / time.total:.0%} of them computing; "
                 f"{time.utilization(advice.cluster):.1%} of what the devices could do is the model's own work (MFU)."),
    ]  # fmt: skip
    return section(f"{number}. {layout.words}", facts(rows))


def _ranks(layout: Layout, job: Job) -> str:
    cut = f"every layer is cut over {layout.tp} neighbours; " if layout.tp > 1 else ""
    long = f"each sequence over {layout.cp} ranks; " if layout.cp > 1 else ""
    stages = f"{job.model.layers} layers are {some(layout.pp * layout.virtual, 'stage')} on {layout.pp} ranks; "
    experts = f"experts are spread over {layout.ep} ranks; " if layout.ep > 1 else ""
    replicas = f"of {layout.dp} replicas {_ZERO[layout.zero]}" if layout.dp > 1 else "there is one replica"
    told = f"{cut}{long}{stages if layout.pp > 1 else ''}{experts}{replicas}. {_AGAIN[layout.recompute]}."
    return told[0].upper() + told[1:]


def _memory(choice: Choice, advice: Advice) -> str:
    held, memory = choice.footprint, advice.cluster.device.memory
    parts = sorted(((getattr(held, part), part) for part in _PARTS), reverse=True)
    told = ", ".join(f"{part} {_gib(size)}" for size, part in parts)
    return f"{_gib(held.total)} of {_gib(memory)} GiB on the fullest device: {told}."


def _bubble(choice: Choice, job: Job) -> str:
    layout, time = choice.layout, choice.time
    if layout.pp == 1:
        return "None: there is no pipeline."
    count = some(layout.microbatches(job), "microbatch")
    return (
        f"{time.bubble / time.total:.1%} of a step: {count} of {some(layout.micro, 'sequence')} under "
        f"{layout.schedule}, while the pipeline fills and empties, and where a stage has more to do than others."
    )


def _communication(choice: Choice) -> str:
    time = choice.time
    said = sorted(((getattr(time, name), told) for name, told in _SAID.items()), reverse=True)
    heard = [f"{told} {each / time.total:.1%}" for each, told in said if each >= time.total / 1000]
    if not heard:
        return "Nothing is waited for: what is said is said while ranks compute."
    return f"{time.communication / time.total:.1%} of a step is waiting for messages: {', '.join(heard)}."


def _gib(size: float) -> str:
    return three_digits(size / GIB)
