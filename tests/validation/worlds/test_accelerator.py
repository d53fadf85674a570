"""What is known of devices, shown on a torch that is told of devices which are not there."""

import argparse
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from pipeproof.worlds import accelerator
from pipeproof.worlds.accelerator import Arithmetic, DeviceError, computing
from tests.support.golden import golden


@dataclass
class Told:
    """A torch with so many devices of one type, and what was asked of them."""

    kind: str
    devices: int
    asked: list[object] = field(default_factory=list)


def there_are(devices: int, monkeypatch: pytest.MonkeyPatch, *, kind: str = "cuda") -> Told:
    """Let torch find ``devices`` accelerators of ``kind``."""
    told = Told(kind, devices)

    def current(check_available: bool = False) -> torch.device | None:
        return torch.device(kind) if devices or not check_available else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    monkeypatch.setattr(torch.accelerator, "set_device_index", told.asked.append)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: told.asked.append("synchronize"))
    return told


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu", torch._C._get_privateuse1_backend_name()])
def test_a_type_that_torch_names_is_one(kind: str) -> None:
    assert accelerator.refusal(kind) == ""
    assert accelerator.parse_device(kind) == kind


def test_another_is_refused_in_a_sentence() -> None:
    golden(accelerator.refusal("gpu"))
    assert accelerator.refusal("").startswith("unknown device ''")
    golden(accelerator.refusal("cuda:0"))
    with pytest.raises(argparse.ArgumentTypeError, match="unknown device 'cdua'"):
        accelerator.parse_device("cdua")
    with pytest.raises(DeviceError, match="device 'cuda:x': expected a type, such as cuda, or a type and a number"):
        accelerator.split("cuda:x")


def test_the_accelerator_of_an_extension_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.refusal("npu")
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    assert accelerator.refusal("npu") == ""


def test_a_common_type_is_known_without_torch() -> None:
    where = "pipeproof.worlds.accelerator"
    code = f"import sys; from {where} import parse_device; parse_device('cuda'); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_ranks_share_the_devices_of_their_host_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(2, monkeypatch)
    assert [accelerator.place_of("cuda", rank) for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert [accelerator.place_of("cuda:1", rank) for rank in range(3)] == ["cuda:1"] * 3, "all on the one that is named"
    assert accelerator.place_of("cpu", 3) == "cpu"
    assert (accelerator.first_of("cuda"), accelerator.first_of("cpu")) == ("cuda:0", "cpu")
    assert accelerator.detect() == "cuda"


def test_a_device_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(0, monkeypatch)
    with pytest.raises(DeviceError, match="ranks cannot compute on cuda: torch finds no cuda device here"):
        accelerator.place_of("cuda", 0)
    assert (accelerator.detect(), accelerator.count("cuda"), accelerator.count("cpu")) == ("cpu", 0, 1)
    there_are(2, monkeypatch)
    with pytest.raises(DeviceError, match="cuda:2: this host has 2 of them, from 0 on"):
        accelerator.place_of("cuda:2", 0)
    golden(accelerator.absence("xpu"))
    assert accelerator.absence("cuda") == accelerator.absence("cpu") == ""


@pytest.mark.parametrize(
    ("device", "ranks", "backend"),
    [("cpu", 2, "gloo"), ("cuda", 2, "nccl"), ("cuda", 1, "nccl"), ("cuda", 3, "gloo"), ("cuda:0", 2, "gloo")],
)
def test_ranks_with_a_device_each_use_its_backend_and_others_the_host(
    device: str, ranks: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there_are(2, monkeypatch)
    assert accelerator.backend_of(device, ranks) == backend


def test_a_device_for_which_torch_has_no_backend_goes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    there_are(2, monkeypatch, kind="mtia")
    assert "mtia" not in dist.Backend.default_device_backend_map
    assert accelerator.backend_of("mtia", 2) == "gloo"


def test_a_rank_uses_its_own_device_and_waits_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    told = there_are(2, monkeypatch)
    for place in ("cpu", "cuda:1"):
        accelerator.use(place)
        accelerator.synchronize(place)
    assert told.asked == [1, "synchronize"], "the host is no device, and does nothing later"


def test_numbers_are_drawn_on_a_device_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.drawing() == [], "there is none"
    there_are(2, monkeypatch)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert accelerator.drawing() == [], "to ask which would put it to use"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert accelerator.drawing() == [1]


def settings() -> tuple[str, bool, bool]:
    """What torch is told."""
    products = torch.backends.cuda.matmul
    exact = torch.are_deterministic_algorithms_enabled()
    return torch.get_float32_matmul_precision(), products.allow_bf16_reduced_precision_reduction, exact


def test_arithmetic_holds_for_a_while() -> None:
    before = settings()
    with computing(Arithmetic(tf32=True, short_sums=True)):
        assert settings() == ("high", True, False)
        with computing(Arithmetic()):
            assert settings() == ("highest", False, False)
        assert settings()[:2] == ("high", True)
    assert settings() == before


def test_the_same_bits_twice_are_wanted_of_a_device_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    accelerator.deterministic("cpu")
    with computing(Arithmetic(deterministic=False)):
        asked.clear()
        accelerator.deterministic("cuda:0")
        assert asked == []
    asked.clear()
    accelerator.deterministic("cuda:0")
    assert asked == [True]
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
