"""The processors of this machine, which ranks share."""

import os

from pipeproof.pipeline.sizes import some
from pipeproof.worlds.launcher import under_torchrun

_CROWD = 8  # ranks on a processor: with more, it takes long until all have begun


def shared(ranks: int) -> str:
    """``4 ranks share 2 processors here``; nothing where each has its own."""
    processors = os.cpu_count() or 1
    return f"{ranks} ranks share {some(processors, 'processor')} here" if ranks > processors else ""


def crowded(ranks: int) -> str:
    """What to say before so many ranks start; nothing where they are few enough."""
    if under_torchrun() or ranks <= _CROWD * (os.cpu_count() or 1):
        return ""
    return f"{shared(ranks)}: this takes long"
