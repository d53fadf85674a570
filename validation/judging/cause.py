"""Causes: the fault that explains mismatches, in the words that a verdict uses."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Each kind of fault and its sentence. One word per fault: specimens plant these, diagnosis names them.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        # What was computed is right and was multiplied wrongly.
        "scale": "gradients are a multiple of what they should be",
        "sign": "gradients have the wrong sign",
        "unequal-weights": "microbatches were weighted alike although their tokens differ, or the other way round",
        # Microbatches, counted or exchanged.
        "dropped": "a microbatch's gradient is missing from the sum",
        "doubled": "a microbatch's gradient was added twice",
        "swapped-activations": "a backward used the activation of another microbatch",
        "swapped-gradients": "a backward used the output gradient of another microbatch",
        "swapped-data": "a microbatch's inputs and targets are not of the same microbatch",
        "stale-gradient": "gradients of an earlier step were added again",
        "stale-tensor": "a tensor of an earlier step was used",
        # Single parameters.
        "zero": "a gradient is zero",
        "missing": "a parameter got no gradient at all",
        "unexpected": "a parameter that is not trained got a gradient",
        "tied-not-summed": "copies of a tied parameter keep their own stage's share",
        "tied-doubled": "a tied parameter's share was counted more than once",
        "extra-term": "something was added to the gradient that is no microbatch's",
        # Ranks that have a stage in common.
        "not-reduced": "replicas of a stage keep the gradients of their own microbatches",
        "misplaced": "a gradient, or a shard of one, lies where another belongs",
        # Around the step.
        "norm": "the gradient norm is not that of the gradients",
        "clip": "gradients were not clipped alike",
        "update": "the optimizer did not do with the gradients what it should",
        "report": "what was computed is right, what was reported is not",
        "mode": "a module ran in the wrong mode",
        "buffers": "state that forwards leave behind is wrong",
        # Messages and memory.
        "wrong-message": "a message arrived as another",
        "overwritten": "a tensor was overwritten while it was still needed",
        "uninitialised": "a tensor was read before it was filled",
        "rounded": "a tensor went through a narrower type",
        "altered": "a tensor was changed on its way",
        "not-finite": "a tensor is not finite",
        # The model itself.
        "computation": "a stage computed something else from right inputs",
        "randomness": "random numbers differ from the reference's",
        "partition": "a stage does not hold the layers that it should",
        # The order of things.
        "order": "the order of actions breaks a law",
        "deadlock": "ranks wait for each other",
        "crash": "a rank failed",
    }
)


@dataclass(frozen=True)
class Cause:
    """A fault, where it is and how sure that is.

    Fields that do not apply, or that the evidence leaves open, are None; ``microbatches`` are those concerned;
    ``detail`` is for people: ``microbatch 3's, expected microbatch 2's``. ``ruled_out`` says of other kinds why not.
    """

    kind: str
    rank: int | None = None
    stage: int | None = None
    microbatches: tuple[int, ...] = ()
    action: str | None = None
    parameter: str | None = None
    factor: float | None = None
    detail: str = ""
    ruled_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"{self.kind!r} is no kind of cause"
