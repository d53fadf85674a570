"""Reasons for "unknown": a fixed list, each with a sentence and a cure."""

from enum import StrEnum
from typing import Self


class Reason(StrEnum):
    """A reason why a law or verdict is unknown.

    sentence: describes it for any step; the law's note describes this step. cure: how to make the law known.
    """

    sentence: str
    cure: str

    def __new__(cls, name: str, sentence: str, cure: str) -> Self:
        one = str.__new__(cls, name)
        one._value_, one.sentence, one.cure = name, sentence, cure
        return one

    def doubt(self, note: str) -> "Doubt":
        """Attach this reason to ``note`` by default."""
        return Doubt(note, reasons_of(note) or (self,))

    RERUN = "rerun", "A stage cannot be run again to the bit.", "Let calls depend on arguments and weights alone."
    LINK = "link", "It follows from what a stage gives, which is unknown.", "See the law boundaries."
    CALLS = "calls", "A stage's calls tell no microbatch.", "Call it once for each microbatch, on what was sent."
    EQUAL_OUTPUTS = "equal-outputs", "Several outputs are equal.", "Check a later step, in which they differ."
    WIRING = "wiring", "An input has no sender, or an output no receiver.", "Hand on what the stages' modules give."
    HIDDEN = "hidden", "A stage takes or gives tensors that are not observed.", "Watch its module; pass plain tensors."
    OWN_BACKWARD = "own-backward", "A backward adds to gradients besides the calls.", "Let the stage add it."
    EQUAL_WEIGHTS = "equal-weights", "A weight of several stages may be one, or several.", "Pass build=, or say ties=."
    STAGES = "stages", "The order of the stages is not known.", "Say stages=, pass build=, or hand back a trace."
    LOSS_SCALE = "loss-scale", "Losses are scaled or divided as no contract says.", "Say loss_scale= or loss_divisor=."
    NOT_FINITE = "not-finite", "A number that the law needs is not finite.", "Check a step that does not overflow."
    ROUNDING = "rounding", "Rounding may be as large as a fault.", "Check a step in fp32, or a longer one."
    NOTHING = "nothing", "The law saw nothing, or zeros alone.", "Check a step in which it is observed, and not zero."
    UNREPORTED = (
        "unreported",
        "The step does not show it.",
        "Return what is missing, or watch each stage.",
    )
    UNCOMPARED = (
        "uncompared",
        "Some values were not compared.",
        "Return all of them from the step, or watch each stage.",
    )
    OPTIMIZER = "optimizer", "The optimizer's step is not known.", "Pass the optimizer that steps these weights."
    HOOKS = "hooks", "Hooks may have changed a gradient.", "Check a step without them."
    PARTS = "parts", "Parts of a tensor do not make a whole.", "Say where each part lies."
    EARLIER = "earlier", "What came before is wrong or unknown.", "Mend that first."
    USE = "use", "What the check was given is of no use, or came too late.", "Give it what its sentence asks for."
    CRASH = "crash", "The check itself raised an error.", "See the traceback."


class Doubt(str):
    """A note with ``reasons`` for an unknown outcome."""

    reasons: tuple[Reason, ...]

    def __new__(cls, note: str, reasons: tuple[Reason, ...] = ()) -> Self:
        one = super().__new__(cls, note)
        one.reasons = reasons_of(note) or reasons
        return one

    def __str__(self) -> str:
        return self  # as an error's message, it stays a Doubt


def reasons_of(*notes: str) -> tuple[Reason, ...]:
    """Merge the reasons in ``notes``, without duplicates."""
    found = (reason for note in notes if isinstance(note, Doubt) for reason in note.reasons)
    return tuple(dict.fromkeys(found))
