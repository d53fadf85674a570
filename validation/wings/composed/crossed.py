"""Messages that arrived as each other: the stages after them take them for what they were meant to be."""

from collections.abc import Mapping
from dataclasses import replace

from pipeproof.observers.calls import Call
from pipeproof.wings.composed.chain import Chain

Meant = Mapping[int, int]  # by the microbatch of which a stage was given the activations, the one that was due


def crossed(chain: Chain) -> Chain | None:
    """``chain``, where messages between two stages may have arrived as each other: so read, what flows back is right.

    It is read so from the first link on where each gradient came back to another microbatch than it was made for.
    None where there is no such link. Whether the targets agree is for the caller to see.
    """
    for stage in chain.stages:
        meant = _meant(chain, stage)
        if meant:
            seen = replace(chain.stages[stage], meant=meant)
            return Chain({**chain.stages, stage: seen}, chain.data)
    return None


def _meant(chain: Chain, stage: int) -> Meant:
    """What each activation that ``stage`` was given was taken for by the stage that sent it; empty if for itself."""
    found: dict[int, int] = {}
    for (of, number), (before, at) in chain.sources.of_inputs.items():
        if of != stage or before is None:
            continue
        made_for = _made_for(chain, stage, number)
        for call, m in _numbered(chain, before):
            flow = call.output_gradients.get(at)
            if flow is not None and flow.digest in made_for and found.setdefault(made_for[flow.digest], m) != m:
                return {}
    moved = {one: other for one, other in found.items() if one != other}
    return moved if {*moved} == {*moved.values()} else {}


def _made_for(chain: Chain, stage: int, number: int) -> dict[bytes, int]:
    """By the digest of each gradient that ``stage`` handed back, its microbatch; without those of several."""
    handed = [(call.input_gradients.get(number), m) for call, m in _numbered(chain, stage)]
    every = [(one.digest, m) for one, m in handed if one is not None and one.norm]
    digests = [digest for digest, _ in every]
    return {digest: m for digest, m in every if digests.count(digest) == 1}


def _numbered(chain: Chain, stage: int) -> list[tuple[Call, int]]:
    pairs = zip(chain.stages[stage].calls, chain.orders[stage].numbers, strict=True)
    return [(call, m) for call, m in pairs if m >= 0]
