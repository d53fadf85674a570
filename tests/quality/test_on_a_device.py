"""What was built for a device, run on one that is pretended: it refuses what a device refuses, and works behind the
host, in one of two orders."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from torch.utils import backend_registration

from pipeproof.own.case import Case
from pipeproof.wings.specimens import DEVICE_CONTROLS, ON_DEVICES
from tests.support.devices import CHECKED, Pretending, trials
from tests.support.golden import golden
from tests.support.sweeps import SWEEP, some

pytestmark = [
    pytest.mark.long,
    pytest.mark.pipeproof_ranks,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch has no device made in Python",
    ),
]
HOST_TENSOR = """
import torch
from torch import nn

from pipeproof import World, whitebox


def build():
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def step(model, microbatches):
    losses = [nn.functional.mse_loss(model(x), torch.zeros(4, 8)) for x, _ in microbatches]
    torch.stack(losses).mean().backward()
    return model, [loss.detach() for loss in losses]


if __name__ == "__main__":
    data = [(torch.randn(4, 8), torch.zeros(4, 8)) for _ in range(2)]
    with World(device="pretend", silent=True) as world:
        judge = whitebox.WhiteBox(world)
        print(judge.validate(step, reference=build, microbatches=data, ranks=1, loss_fn=nn.functional.mse_loss).details)
"""


AGAINST_ITSELF = """
import torch
import torch.distributed as dist
from torch import nn

from pipeproof import StageByStage, World, check_step

loss_fn, count = nn.functional.mse_loss, 3


def steps(context, factor):
    torch.manual_seed(context.rank)
    stage = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).to(context.device)
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(2, 4, generator=draw), torch.zeros(2, 4).to(context.device)) for _ in range(count)]
    told = None if context.rank else [(x.to(context.device), target) for x, target in data]
    by = StageByStage(loss_fn, host=True)
    with check_step(stage, told or data, against=by, rename=lambda stage, name: f"{stage}.{name}") as check:
        losses, live = [], []
        for number, (x, target) in enumerate(data):
            if context.rank:
                dist.recv(x, 0)
                x = x.to(context.device).requires_grad_()
                y = stage(x)
                losses.append(loss_fn(y, target))
                live.append((x, losses[-1] / count))
            else:
                live.append((x, stage(told[number][0])))
                dist.send(live[-1][1].detach().cpu(), 1)
        for number, (x, y) in enumerate(live):
            if context.rank:
                y.backward()
                dist.send(x.grad.cpu(), 0)
            else:
                came = torch.empty(2, 4)
                dist.recv(came, 1)
                y.backward(came.to(context.device) * (factor if number else 1.0))  # here
        check.gradients()
        check.report(losses=losses or None)
    return check.verdict.details


if __name__ == "__main__":
    with World(device="pretend", silent=True) as world:
        for factor in (1.0, 1.5):
            print(world.run(steps, factor, ranks=2)[0])
"""


SHAPE = ("--ranks", "2", "--microbatches", "3", "--layers", "4", "--model", "gpt-tied")
VALIDATE = ("-m", "pipeproof", "validate", *SHAPE)
ORDERS = ("late", "ahead")
HIDDEN = {"late": "device-buffer-reused", "ahead": "side-stream-not-waited-for"}  # races that go well in this order


ORDERED = [
    pytest.param(*each, marks=() if each == ("late", "zb-v") else SWEEP) for each in product(ORDERS, ("1f1b", "zb-v"))
]


@pytest.fixture(scope="module")
def machine() -> Iterator[Pretending]:
    pretending = Pretending()
    yield pretending
    pretending.close()


@pytest.mark.parametrize("check", ["whole", pytest.param("composed", marks=SWEEP)])
@pytest.mark.parametrize(("order", "schedule"), ORDERED)
def test_schedules_are_right_there_through_the_host_and_it_is_found_by_itself(
    machine: Pretending, tmp_path: Path, order: str, schedule: str, check: str
) -> None:
    ran = machine.run(tmp_path, *VALIDATE, "--check", check, "--schedule", schedule, order=order)
    assert ran.returncode == 0, ran.stdout
    golden(ran.stdout.splitlines()[-1])


def test_a_fault_is_named_there(machine: Pretending, tmp_path: Path) -> None:
    line = "1f1b r2 s2 m4 model=mlp plan=train specimen=microbatches-swapped device=pretend"
    ran = machine.run(tmp_path, "-m", "pipeproof", "replay", line)
    assert ran.returncode == 1, ran.stdout
    assert "cause     swapped-data: " in ran.stdout
    assert "microbatches 0, 1" in ran.stdout
    assert "was not measured" not in ran.stdout, "rounding is measured on the device"


def test_a_tensor_that_was_left_on_the_host_is_told_with_its_line(machine: Pretending, tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(HOST_TENSOR)
    ran = machine.run(tmp_path, "left.py")
    golden(ran.stdout, lines="Expected all tensors|in step$|^ *losses =")


@pytest.mark.sweep
@pytest.mark.parametrize("order", some(ORDERS, left=["late"]))
def test_what_only_a_device_shows_is_caught_named_and_located(machine: Pretending, tmp_path: Path, order: str) -> None:
    names = [name for name in ON_DEVICES if name != HIDDEN[order]]
    command = ("-m", "pipeproof", "mutate", "--device", "pretend", "--json", "found.json", "--only", ",".join(names))
    ran = machine.run(tmp_path, *command, order=order)
    assert ran.returncode == 0, ran.stdout
    found = trials(tmp_path / "found.json")
    assert sorted(found) == sorted(names)
    assert [name for name, one in found.items() if not one["recorded"]["located"]] == []


@pytest.mark.sweep
@pytest.mark.parametrize("order", some(ORDERS, left=["ahead"]))
def test_copies_that_are_waited_for_are_right_in_any_order(machine: Pretending, tmp_path: Path, order: str) -> None:
    (name,) = DEVICE_CONTROLS
    ran = machine.run(
        tmp_path, "-m", "pipeproof", "replay", f"gpipe r2 s2 m4 model=mlp device=pretend specimen={name}", order=order
    )
    golden(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("given", "place", "told"),
    [
        ((), "pretend", "PASS 36 comparisons, bitwise"),
        (("device=cpu",), "cpu", "PASS 36 comparisons, bitwise"),
        (("times=2",), "pretend", "FAIL everywhere: gradients are a multiple of what they should be (x2)"),
    ],
    ids=["right", "on the host", "wrong"],
)
def test_a_running_job_is_checked_there_by_a_model_that_computes_there_too(
    machine: Pretending, tmp_path: Path, given: tuple[str, ...], place: str, told: str
) -> None:
    (tmp_path / "checked.py").write_text(CHECKED)
    ran = machine.run(tmp_path, "checked.py", "pretend", *given)
    assert ran.stdout.startswith(told), ran.stdout
    assert ran.stdout.split()[-1] == place


def test_what_the_host_kept_is_run_again_there_and_a_backward_has_its_line(machine: Pretending, tmp_path: Path) -> None:
    (tmp_path / "links.py").write_text(AGAINST_ITSELF)
    ran = machine.run(tmp_path, "links.py")
    right, _, wrong = ran.stdout.partition("FAIL ")
    assert right.startswith("PASS "), ran.stdout
    assert "cause     scale: " in wrong, ran.stdout
    golden(wrong, lines="^  ran at")


@pytest.mark.parametrize("name", [*ON_DEVICES, *DEVICE_CONTROLS])
def test_faults_of_devices_need_one(name: str) -> None:
    one = {**ON_DEVICES, **DEVICE_CONTROLS}[name]
    case = Case.parse(one.smallest)
    golden(one.missing(case))
    assert one.needs.missing(case) == ""
