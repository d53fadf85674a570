"""A call of a stage that was given what an operation before had."""

from typing import NamedTuple


class StaleCall(NamedTuple):
    """``call``, from 1 on, of ``stage`` with a tensor that a microbatch of an ``operation`` before, from 1 on, had."""

    stage: int
    call: int
    operation: int
    microbatch: int
