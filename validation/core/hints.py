"""Hints for each cause kind, and meanings for factors."""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from pipeproof.core.cause import KINDS, Cause
from pipeproof.core.measured import Measured

HINTS: Mapping[str, str] = MappingProxyType(
    {
        "scale": "Look for a division or a multiplication that is missing, or done twice: the loss by the number of "
        "microbatches, gradients by ranks, replicas, tokens or the loss scale.",
        "sign": "Look for a minus: a loss that is maximised, or a gradient that is subtracted where it is added.",
        "unequal-weights": "Are losses averaged over microbatches whose tokens differ? Divide sums of losses by the "
        "number of all tokens, or means by the number of microbatches, of all replicas, and do so on both sides.",
        "step-skipped": "All ranks must know whether any gradient overflows before one takes its step: reduce that "
        "over all.",
        "dropped": "Find this microbatch's backward: is it in the schedule, does its loop run to the end, did "
        "its message come without requires_grad, and does anything clear gradients after it?",
        "doubled": "Find this microbatch's backward: does it run twice, or does anything add its gradient once more?",
        "swapped-activations": "Compare the order in which activations are kept with the order in which backwards take "
        "them: first in, first out, or by the microbatch's number.",
        "swapped-gradients": "Compare the order in which the next stage sends gradients with the order in which this "
        "one receives them: both go by microbatch, and so do their tags.",
        "swapped-data": "Do the first stage and the last, and ranks that share a stage, take the same microbatch, "
        "from one loader in one order?",
        "stale-gradient": "Clear gradients before the step: is zero_grad called, on all parameters, and once?",
        "stale-tensor": "Find the buffer, the queue or the cache that outlives a step: empty it between two.",
        "zero": "Is the parameter used in the forward that is differentiated? Look for detach, no_grad, and for "
        "anything that clears gradients after the backward.",
        "missing": "Is the parameter in the graph of the loss? Look for detach, no_grad and requires_grad.",
        "unexpected": "Look at requires_grad: is what is frozen in the reference trained here, or used where it should "
        "not be?",
        "tied-not-summed": "Add up the gradients of the tied copies over the stages that hold them, before the norm.",
        "tied-doubled": "The copies' gradients are summed more than once, or by a stage that has the sum already: "
        "reduce them once.",
        "extra-term": "What adds to these gradients besides the microbatches: an auxiliary loss, weight decay, another "
        "model's backward?",
        "not-reduced": "Reduce gradients over these ranks, in the backward or after the last one: is an all-reduce or "
        "a hook left out, a group too small, or no_sync left on?",
        "replicas-apart": "Do all replicas begin training with the weights of one, and did each step since have the "
        "same gradients and settings on all of them?",
        "misplaced": "Compare the order of parameters, or of shards, on both sides of the copy; of a reduction, the "
        "ranks of its group.",
        "norm": "Add up squares, not norms, and count each parameter once over all ranks, tied ones too.",
        "clip": "Clip all ranks' gradients by one factor: that of the norm over all stages.",
        "update": "Does the optimizer hold these parameters, with the settings that it should have, and does it step "
        "once, as does a scheduler of its rate?",
        "report": "Gradients are right. Look at how what is reported is averaged, and from which rank it comes.",
        "mode": "Call train() or eval() on every stage's module before its first forward.",
        "buffers": "Which forwards update the buffer? Each microbatch's once, in order, and none of a trial.",
        "wrong-message": "Compare the sends of one rank with the receives of the other, in order: peer, tag and "
        "microbatch must agree.",
        "mispaired": "Compare the order in which tensors come in with the order in which this stage uses them: both "
        "must take the microbatches alike.",
        "overwritten": "Give each microbatch that is still needed a buffer of its own, or wait until the last one that "
        "reads it is done.",
        "uninitialised": "Wait for the receive before its buffer is read. Is it sent at all, as each gradient must be?",
        "rounded": "Look for a cast on the tensor's way: autocast, a buffer or a sum of a narrower type, a message.",
        "altered": "What writes to this tensor, or moves its elements, after it is made and before it is read?",
        "not-finite": "Begin at the first action with an output that is not finite. Are its inputs finite? Then look "
        "at that stage, else at the message to it.",
        "computation": "Compare, layer by layer, what this stage's module computes with what it should.",
        "randomness": "Draw by seed, layer and microbatch, never by the order of draws: fork the generator for each.",
        "partition": "Compare the layers that each stage holds with the split: each layer once, in order.",
        "order": "The line says which law breaks where: change the order of these actions in the schedule.",
        "deadlock": "Look at who waits for whom: one of these sends or receives is missing, or comes too late.",
        "read-before-wait": "Wait for the work that the receive or collective gave back before its buffer is used.",
        "overwritten-in-flight": "Wait for the work before its buffer is written again, or give it a copy.",
        "freed-in-flight": "Wait for the work before its buffer is freed, resized or given back to a pool.",
        "never-waited": "Keep the work that isend or irecv gave back, and wait for it before the step returns.",
        "received-twice": "Give each receive a buffer of its own, or wait for the first before the second is posted.",
        "mismatched": "Compare what one line sends with what the other receives: number of elements and type.",
        "desynchronised": "Every rank of a group must call the same collectives in the same order: look for one "
        "under a condition that ranks do not share.",
        "crash": "Read the rank's traceback: nothing could be compared behind it.",
    }
)
assert HINTS.keys() == KINDS.keys(), HINTS.keys() ^ KINDS.keys()  # a verdict without a hint would crash

_CUT = (
    "Look in this stage's forward for what cuts the graph: detach, .data, no_grad, or a custom Function "
    "whose backward returns None."
)


def hints(causes: Sequence[Cause], measured: Measured) -> list[str]:
    """Return hints, one per cause kind; a factor's meaning comes first."""
    first: dict[str, Cause] = {}
    for cause in causes:
        first.setdefault(_CUT if cause.cut else HINTS[cause.kind], cause)
    return [text for hint, cause in first.items() for text in (*_factors(cause, measured), hint)]


def _factors(cause: Cause, measured: Measured) -> Iterator[str]:
    """Yield counts equal to a cause's factor, such as numbers of microbatches or ranks."""
    if cause.kind != "scale" or cause.factor is None:
        return
    ran, losses = measured.ran, {one.microbatch for one in measured.of("loss") if one.microbatch is not None}
    counts = {"microbatches": len(losses) if ran is None else ran.microbatches}
    if ran is not None and not cause.microbatches:  # a factor in single microbatches has nothing to do with ranks
        ranks, stages = len(ran.ranks), len(ran.placement)
        together, rest = divmod(ranks, len({*ran.placement}) or 1)
        counts |= {"ranks": ranks} | ({} if rest else {"ranks of a stage": together})
        counts |= {} if stages == ranks else {"stages": stages}
    for what, count in counts.items():
        if count > 1 and math.isclose(cause.factor, count, rel_tol=1e-3):
            yield f"{count} = the number of {what}: is the loss, or its gradient, divided by it?"
        elif count > 1 and math.isclose(cause.factor * count, 1, rel_tol=1e-3):
            yield f"1/{count}, and {count} = the number of {what}: is anything divided twice by it?"
