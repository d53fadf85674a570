"""Kinds of parallelism in small: savings, costs, and a step on real ranks compared with one device.

A primitive (``primitive.PRIMITIVES``) is a row of a table: its axes of the mesh, formulas for savings and costs, and
its implementation. Its work on a rank is a ``part.RankPart``: how a stage is wrapped, how its gradients are reduced,
where the parts of its parameters lie. A stack (``stacks.Stack``) combines several over one decoder, written as a line
such as ``pp=2,tp=2,ddp=2``; ``stacked`` runs it and gives the step to the white box, which knows nothing of primitives:
the wing uses ``validate`` like a user's own step.

Begin with ``part`` and ``data_parallel``, then ``stacked``. A new primitive is one file: its ``RankPart``, a row of
``primitive.PRIMITIVES``, and its ``PARTS`` in ``stacked.PARTS``. The face loads without torch, for the command line.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeproof.wings.primitives.config_stack import not_stacked as not_stacked
from pipeproof.wings.primitives.config_stack import stack_of as stack_of
from pipeproof.wings.primitives.primitive import PRIMITIVES as PRIMITIVES
from pipeproof.wings.primitives.primitive import SYMBOLS as SYMBOLS
from pipeproof.wings.primitives.primitive import VARIANTS as VARIANTS
from pipeproof.wings.primitives.primitive import Figures as Figures
from pipeproof.wings.primitives.primitive import Primitive as Primitive
from pipeproof.wings.primitives.primitive import figures as figures
from pipeproof.wings.primitives.stacks import ONE_DEVICE as ONE_DEVICE
from pipeproof.wings.primitives.stacks import Stack as Stack
from pipeproof.wings.primitives.stacks import find_primitive as find_primitive
from pipeproof.wings.primitives.stacks import smallest_stack as smallest_stack
from pipeproof.wings.primitives.words import LEGEND as LEGEND
from pipeproof.wings.primitives.words import as_data as as_data
from pipeproof.wings.primitives.words import describe as describe

if TYPE_CHECKING:
    from pipeproof.core.verdict import Verdict
    from pipeproof.own.timed_step import Running
    from pipeproof.whitebox import WhiteBox
    from pipeproof.worlds.worker import RankContext


def validate_stack(stack: Stack, whitebox: "WhiteBox") -> "Verdict":
    """Validate a step of ``stack`` against the decoder on one device."""
    from pipeproof.wings.primitives.stacked import validate_stack

    return validate_stack(stack, whitebox)


def setup_stack(context: "RankContext", stack: Stack) -> "Callable[[], Running]":
    """Prepare this rank of ``stack`` for timing."""
    from pipeproof.wings.primitives.stacked import setup

    return setup(context, stack)
