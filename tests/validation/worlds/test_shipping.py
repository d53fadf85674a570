"""Code of a test module travels by value, everything else by name; what comes back is what was sent."""

import dataclasses
import enum
import pickletools
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.pipeline.action import Action
from pipeproof.worlds.shipping import pack, pack_job, unpack, unpack_job


@dataclasses.dataclass(frozen=True)
class Point:
    """A class of this module."""

    x: int

    def twice(self) -> int:
        return 2 * self.x


class Colour(enum.Enum):
    """An enumeration of this module."""

    RED = 1


def names_in(data: bytes) -> set[Any]:
    """All strings in a pickle: the names by which it asks for code among them."""
    return {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}


def test_a_function_of_a_test_module_travels_by_value() -> None:
    def double(x: int) -> int:
        assert x > 0, "positive"
        return factor * x

    factor = 2
    copy = unpack(pack(double))
    assert copy is not double
    assert copy(3) == 6
    assert "import_module" not in names_in(pack(names_in))


def test_code_that_travels_by_value_is_still_of_its_file() -> None:
    def outer() -> Any:
        return lambda: None

    there = unpack(pack(outer))
    assert there.__code__ is not outer.__code__
    assert there.__code__.co_filename == there().__code__.co_filename == __file__


def test_a_class_that_comes_back_is_the_class_it_was() -> None:
    twice = Point.twice
    point = unpack(pack(Point(3)))
    assert type(point) is Point
    assert point == Point(3)
    assert unpack(pack(Colour.RED)) is Colour.RED
    assert Point.twice is twice, "the copy does not change the original"


def test_a_class_made_in_a_function_travels_too() -> None:
    class Local:
        x = 4

    assert unpack(pack(Local)).x == 4


def test_code_of_a_package_travels_by_name() -> None:
    data = pack(Action.__init__)
    assert unpack(data) is Action.__init__
    assert len(data) < 200


def test_a_tensor_travels_as_its_bytes() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    copy = unpack(pack(tensor))
    assert torch.equal(copy, tensor)
    copy.zero_()
    assert tensor.sum() == 15
    assert not copy.is_shared()


def content(tensor: Tensor) -> bytes:
    """The elements in order; of a dtype without a name in numpy too."""
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        torch.arange(4, dtype=torch.int64).reshape(2, 2),
        torch.tensor([1 + 2j, 3 - 1j]),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.ones(3, requires_grad=True),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(6.0)[2:5],
        torch.eye(3).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}-{tensor.layout}",
)
def test_a_tensor_is_the_same_bits_in_the_same_form(tensor: Tensor) -> None:
    copy = unpack(pack(tensor))
    assert (copy.dtype, copy.shape, copy.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert copy.requires_grad == tensor.requires_grad
    assert copy.is_conj() == tensor.is_conj()
    if tensor.layout is torch.strided:
        assert copy.stride() == tensor.stride()
        assert content(copy) == content(tensor)
        assert copy.detach().data_ptr() % 64 == 0 or not tensor.numel()
    else:
        assert torch.equal(copy.to_dense(), tensor.to_dense())


def test_what_is_more_than_its_elements_keeps_that() -> None:
    named = torch.ones(2)
    named.origin = "here"  # type: ignore[attr-defined]
    assert unpack(pack(named)).origin == "here"
    assert type(unpack(pack(nn.Parameter(torch.ones(2))))) is nn.Parameter


def test_a_tensor_sent_twice_is_one_tensor() -> None:
    one = torch.ones(2)
    first, second = unpack(pack((one, one)))
    assert first is second


class Settings:
    """Something with a ``config``, as models have."""

    config = ("layers", 2)


def configured(model: Settings) -> Any:
    """What cloudpickle takes for a use of ``torch.distributed.config``, a module that cannot be pickled."""
    return torch.distributed.is_available(), model.config


def test_a_module_of_its_own_kind_travels_by_name() -> None:
    assert unpack(pack(configured))(Settings()) == (True, ("layers", 2))
    for module in (torch.distributed.config, torch.ops, torch.ops.aten):
        assert unpack(pack(module)) is module


def test_a_module_that_nobody_can_import_is_no_name() -> None:
    class Lazy(types.ModuleType):
        pass

    with pytest.raises(TypeError, match="cannot pickle 'Lazy' object"):
        pack(Lazy("nowhere.at_all"))


class Loaded:
    """Says when it is unpacked."""

    def __reduce__(self) -> Any:
        return note, ("job",)


def note(what: str = "first") -> str:
    told.append(what)
    return what


told: list[str] = []


def test_what_comes_first_is_called_before_a_job_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("pipeproof.worlds.shipping.register_pickle_by_value", None)  # this module's code by name
    monkeypatch.setattr("pipeproof.worlds.shipping.FIRST", [note])
    assert unpack_job(pack_job(len, Loaded())) == (len, ("job",))
    assert told == ["first", "job"]
