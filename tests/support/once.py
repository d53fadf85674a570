"""Work that costs much and comes to the same for every worker of pytest-xdist is done by the first that needs it."""

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest


def once(factory: pytest.TempPathFactory, name: str, work: Callable[[], Any]) -> Any:
    """What ``work`` gives, as it comes back from JSON; the other workers wait for it and read it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # all workers of this session have that one
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = base / f"{name}.json"
        if not kept.exists():
            kept.write_text(json.dumps(work()))
    return json.loads(kept.read_text())
