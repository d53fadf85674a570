"""The lines that set what a call worked on, as a source reads."""

from pathlib import Path

import pytest

from pipeproof.diagnosis.set_at import backward_of, received_by, set_at
from pipeproof.worlds.stack import Line, Stack

LOOP = """
class Loop:
    def forward(self, x, target):
        y = self.stage(x)
        if self.last:
            self.losses.append(loss_fn(y, target))
            y = self.losses[-1] / 4
        self.live[self.chunk].append((x, y))

    def backward(self, gradient):
        while self.live:
            x, y = self.live[0].pop(0)
            run(y, gradient)

def run(output, gradient=None):
    torch.autograd.backward(output, gradient)

def alone(batches):
    for x, target in batches:
        if target is None:
            loss = model(x)
        else:
            loss = loss_fn(model(x), target)
        (loss / 4).backward()

def receive(like, peer):
    for buffer in [torch.empty_like(like)]:
        work = irecv(tensor=buffer, src=peer)
    return kept[peer].backward()

def several(layers, losses):
    for one in layers:
        one.train()
    torch.autograd.grad([one / 4 for one in losses if one.requires_grad])
"""


def line(folder: Path, text: str, function: str) -> Line:
    path = folder / "loop.py"
    path.write_text(LOOP)
    (number,) = [number for number, one in enumerate(LOOP.splitlines(), 1) if text in one]
    return Line(str(path), number, function, LOOP.splitlines()[number - 1].strip())


def told(stack: Stack, role: object = backward_of) -> list[str]:
    return [f"{name}: {one.text}" for name, one in set_at(stack, role)]  # type: ignore[arg-type]


def test_a_value_is_followed_through_calls_and_containers_to_what_made_it(tmp_path: Path) -> None:
    stack = line(tmp_path, "autograd.backward", "run"), line(tmp_path, "run(y, ", "backward")
    assert told(stack) == [
        "y: x, y = self.live[0].pop(0)",
        "live: self.live[self.chunk].append((x, y))",
        "y, if reached: y = self.losses[-1] / 4",
        "y: y = self.stage(x)",
        "losses, if reached: self.losses.append(loss_fn(y, target))",
    ]


def test_both_branches_reach(tmp_path: Path) -> None:
    found = told((line(tmp_path, "(loss / 4)", "alone"),))
    assert sorted(found) == ["loss, if reached: loss = loss_fn(model(x), target)", "loss, if reached: loss = model(x)"]


def test_a_buffer_of_a_loop_is_set_by_the_loop(tmp_path: Path) -> None:
    stack = (line(tmp_path, "work = irecv", "receive"),)
    assert told(stack, received_by) == ["buffer: for buffer in [torch.empty_like(like)]:"]


@pytest.mark.parametrize(("text", "function"), [("kept[peer]", "receive"), ("autograd.backward", "run")])
def test_what_the_source_does_not_tell_is_left_out(text: str, function: str, tmp_path: Path) -> None:
    assert told((line(tmp_path, text, function),)) == []


def test_a_variable_of_a_comprehension_is_its_own(tmp_path: Path) -> None:
    """What a loop before it calls by the same name is another."""
    assert told((line(tmp_path, "[one / 4", "several"),)) == []


def test_a_source_that_has_changed_tells_nothing(tmp_path: Path) -> None:
    stack = (line(tmp_path, "(loss / 4)", "alone"),)
    Path(stack[0].file).write_text("\n" + LOOP)
    assert told(stack) == []
    Path(stack[0].file).write_text("(\n" * stack[0].number + stack[0].text)
    assert told(()) == told(stack) == []
