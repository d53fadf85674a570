"""Code of a test module travels by value, everything else by name; what comes back is what was sent."""

import dataclasses
import enum
import pickletools
from typing import Any

import torch

from pipeline.action import Action
from validation.shipping import pack, unpack


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
