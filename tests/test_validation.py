"""What the packages offer by name is there, also what loads when first used."""

from types import ModuleType

import pytest

import pipeproof
from pipeproof import pipeline, reference, whitebox


@pytest.mark.parametrize("package", [pipeproof, pipeline, reference, whitebox], ids=lambda package: package.__name__)
def test_every_name_that_is_offered_can_be_had(package: ModuleType) -> None:
    names = getattr(package, "__all__", ())
    assert all(getattr(package, name) is not None for name in names)
    assert names or package is reference
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name


def test_errors_that_a_user_catches_have_short_names() -> None:
    for name in ("PipelineMismatch", "NoVerdict", "ValidationFailed"):
        error = getattr(pipeproof.errors, name)
        assert f"{error.__module__}.{error.__qualname__}" == f"pipeproof.errors.{name}"
