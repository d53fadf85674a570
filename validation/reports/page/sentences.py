"""What a page says first: the verdict as a person would say it, and where it is."""

from collections.abc import Sequence

from pipeproof.core.cause import KINDS, Cause
from pipeproof.core.text import headline
from pipeproof.core.verdict import Verdict, small

OUTCOMES = {"pass": "Pass", "fail": "Fail", "unknown": "Unknown", "error": "Error", "hang": "Hang"}
OUTCOMES |= {"same": "Same", "different": "Different"}


def sentence(verdict: Verdict) -> str:
    """The verdict in one sentence."""
    if verdict.headline or not verdict.cause:  # who raised what, or who waits for whom, says more than a kind of cause
        return f"{_capital(_headline(verdict))}."
    first, others = verdict.cause[0], len(verdict.cause) - 1
    also = f", and {others} more" if others else ""
    said = KINDS[first.kind]
    if first.kind == "scale" and first.factor is not None:
        said = said.replace("a multiple of", f"{first.factor:.4g} times")
    return f"{_capital(said)}{_at(first)}{also}."


def closest(verdict: Verdict) -> str:
    """Which comparison came nearest to what rounding allows; empty where all agree bit for bit, or nothing was."""
    measured = [one for one in verdict.measured.compared if one.limit and one.error]
    if not measured:
        return ""
    one = max(measured, key=lambda one: one.error / (one.limit or 1.0))
    what = one.parameter or ("" if one.microbatch is None else f"microbatch {one.microbatch}")
    allowed = one.limit or 1.0
    return (
        f"closest: {one.law} {what}".rstrip()
        + f", error {small(one.error)}, {one.error / allowed:.2g} of what rounding allows"
    )


def _headline(verdict: Verdict) -> str:
    """The first line of the text, without its outcome."""
    if verdict.verdict == "pass":
        count, rest = sum(law.checked for law in verdict.laws), sum(law.exact for law in verdict.laws)
        how = (
            "bit for bit"
            if count == rest
            else f"{rest} of them bit for bit, the others to the rounding of {verdict.tier}"
        )
        return f"all {count} comparisons agree, {how}"
    text = headline(verdict)
    if verdict.word == "different":
        return f"The two runs differ: {text}"
    return f"{text}; its cause is not known" if verdict.word == "fail" and not verdict.cause else text


def _at(cause: Cause) -> str:
    """Where, in words: stage, microbatches and rank, as far as the cause names them."""
    stages = cause.stages or (() if cause.stage is None else (cause.stage,))
    parts = [_few("stage", stages), _few("microbatch", cause.microbatches, "microbatches")]
    parts += ["" if cause.parameter is None else f"parameter {cause.parameter}"]
    parts += [_few("rank", cause.ranks or (() if cause.rank is None else (cause.rank,)))]
    told = ", ".join(filter(None, parts))
    return f" ({told})" if told else ""


def _few(word: str, numbers: Sequence[int], plural: str = "") -> str:
    if not numbers:
        return ""
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    run = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{plural or word + 's'} " + (f"{numbers[0]} to {numbers[-1]}" if run else ", ".join(map(str, numbers)))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
