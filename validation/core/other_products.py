"""Products of fp32 that are rounded more coarsely on one side than on the other: all may be off a little by that."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeproof.core.limits import BY_NAME
from pipeproof.core.verdict import Mismatch, Verdict
from pipeproof.reference.products import CONVOLUTION, MATRICES

# Units of the coarser rounding: as far off may these be. Units near zero that are on in one run and off in the other
# put gradients farther off than losses. Nothing is lost by a generous bound: computed alike, the next run decides.
_UNITS = {"loss": 16, "grad-norm": 16, "gradient": 64}
_TOLD = {  # what they are called, and where they are set
    MATRICES: ("matrix products", "torch.set_float32_matmul_precision"),
    CONVOLUTION: ("convolutions", "torch.backends.fp32_precision"),
}


@dataclass(frozen=True)
class OtherProducts:
    """As what one sort of them is rounded in what is ``due``, and in what is ``seen``: names of ``products_in``."""

    sort: str
    due: str
    seen: str

    @classmethod
    def among(cls, due: Mapping[str, str], seen: Iterable[Mapping[str, str]]) -> "OtherProducts | None":
        """The first sort that any of those that were seen has otherwise; None where nobody says so."""
        both = ((sort, name, one.get(sort, name)) for one in seen for sort, name in due.items())
        return next((cls(*found) for found in both if found[1] != found[2] and {*found[1:]} <= BY_NAME.keys()), None)

    def explain(self, verdict: Verdict, wrong: Sequence[Mismatch]) -> bool:
        """Whether that may be all: what is ``wrong`` is hardly off, and so are half of the gradients or more.

        What is right to the last place was computed alike, and what follows from it would be.
        """
        gradients = [one for one in verdict.measured.of("gradient") if one.error or not one.floor]
        off = {one.parameter for one in gradients if one.outcome != "pass"}
        return 2 * len(off) >= len(gradients) > 0 and all(self._explains(one, off) for one in wrong)

    def _explains(self, one: Mismatch, off: set[str | None]) -> bool:
        if one.law == "updated-parameters":  # an optimizer may make much of little
            return one.parameter in off
        if one.law == "boundaries":  # of another microbatch's tensor, or a part of one, gradients would be far off
            return True
        unit = max(BY_NAME[self.due].unit, BY_NAME[self.seen].unit)
        return one.error is not None and one.error <= _UNITS.get(one.law, 0) * unit

    @property
    def note(self) -> str:
        """Why nothing is proven, and what to do."""
        what, where = _TOLD.get(self.sort, (self.sort, "torch's settings"))
        return (
            f"no fault is proven: the job computes {what} of fp32 in {self.seen}, and what is due was computed in "
            f"{self.due}, which may put everything off a little; have both computed alike: {where} says how"
        )
