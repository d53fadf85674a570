"""One gloo device for all process groups of a rank.

torch gives each group a device of its own, whose thread wakes a hundred times a second for as long as the process
lives: the groups that tests leave on ranks that are kept would take half of a core. One device serves them all alike.
Numbers and their order are the groups' own affair.
"""

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def share_gloo_device() -> None:
    """Give all gloo groups that this process makes from now on one device."""
    if dist.is_gloo_available():
        gloo: Any = dist.ProcessGroupGloo
        own = gloo.__init__
        devices = functools.cache(_devices)

        @functools.wraps(own)
        def made(self: Any, store: Any, rank: int, size: int, *given: Any, **named: Any) -> Any:
            options = gloo._Options()
            apart = [name for name in named if name != "timeout" and not hasattr(options, name)]
            more = [*given]
            if len(more) == 1 and isinstance(more[0], timedelta) and "timeout" not in named:
                named["timeout"] = more.pop()
            if more or apart or not isinstance(named.get("timeout"), timedelta):  # not as torch's groups are made
                return own(self, store, rank, size, *more, **named)
            options._timeout, options._devices = named.pop("timeout"), [*devices()]
            options._threads = 2 * len(options._devices)
            for name, value in named.items():
                setattr(options, name, value)
            return own(self, store, rank, size, options)

        gloo.__init__ = made


def _devices() -> tuple[Any, ...]:
    """Those that torch would choose: of each interface that the environment names, or of the host's name."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        return (dist.ProcessGroupGloo.create_default_device(),)
    return tuple(dist.ProcessGroupGloo.create_device(interface=one) for one in interfaces.split(","))
