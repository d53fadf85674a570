"""What wings and other packages give at extension points is found by name; what is not there is unknown."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from pipeproof import extensions
from pipeproof.worlds.world import open_world


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """What is found is kept."""
    yield
    for one in (extensions.extensions, extensions.extension, extensions.names):
        one.cache_clear()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wing and a package, each with one that is there and one that is not."""
    for one in (extensions.extensions, extensions.extension, extensions.names):
        one.cache_clear()
    own = {"here": "pipeproof.pipeline.action:Kind", "gone": "pipeproof.wings.dreamt:World"}
    others = [EntryPoint("theirs", "json:loads", "pipeproof.tools"), EntryPoint("lost", "dreamt:x", "pipeproof.tools")]
    monkeypatch.setattr(extensions, "GIVEN", {"tools": own})
    monkeypatch.setattr(extensions, "entry_points", lambda group: [one for one in others if one.group == group])


@pytest.mark.usefixtures("given")
def test_what_is_there_is_found() -> None:
    from json import loads

    from pipeproof.pipeline.action import Kind

    assert extensions.names("tools") == ("here", "theirs")
    assert extensions.extensions("tools") == {"here": Kind, "theirs": loads}
    assert [extensions.extension("tools", name) for name in ("here", "gone", "lost")] == [Kind, None, None]
    assert extensions.names("nothing") == ()


def test_a_world_that_is_not_there_is_unknown() -> None:
    with pytest.raises(ValueError, match="kind is 'dreamt': expected real or simulated"):
        open_world("dreamt")
