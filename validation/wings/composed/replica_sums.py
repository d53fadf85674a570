"""Replicas of stages: what each adds up is summed over all of them, in groups of the check's own."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.limits import precision_of
from pipeproof.core.tolerance import Floor, error
from pipeproof.diagnosis.naming import STALE
from pipeproof.foreign.crossings import near
from pipeproof.observers.shards import Shard, untiled
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.pipeline.sizes import first_few
from pipeproof.wings.composed.comm_hooks import CommHook
from pipeproof.wings.composed.held_gradients import length_in_pieces
from pipeproof.wings.composed.own_shards import OwnShards
from pipeproof.wings.composed.peers import Peers
from pipeproof.worlds.side_store import Exchange

_BY_ONE = "one of the replicas did not clear it"
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # what not every backend adds up


@dataclass(frozen=True)
class _Lengths:
    """The norms of this replica's sum, of the sums of all ``replicas`` one by one, added up, and of the ``whole``."""

    own: float
    every: float
    whole: float
    replicas: int


@dataclass
class ReplicaSums:
    """The sums of this rank's stages over all replicas, which its ``peers`` have.

    ``own``: this rank's parameters; ``together``: how many peers have the same sum, as parts of one replica. ``hooks``:
    those through which gradients are reduced, by name; once they are ``summed``, those that all peers have. ``alone``:
    what this replica alone adds up of what this rank has of each, in a few numbers. ``untiled``: the gradients that
    ranks have parts of which are not all of it, with the reason.
    """

    exchange: Exchange
    peers: Peers
    own: OwnShards
    together: int = 1
    hooks: Mapping[str, CommHook] = field(default_factory=dict)
    alone: dict[str, Sketch] = field(default_factory=dict)
    untiled: dict[str, str] = field(default_factory=dict)
    _lengths: dict[str, _Lengths] = field(default_factory=dict)
    _casts: dict[int, tuple[torch.dtype, float]] = field(default_factory=dict)  # by parameter: what a hook's type does

    def summed(self, sums: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """``sums``, which are used up, over all replicas.

        Every rank calls this. It calls ``all_reduce`` for each of them.
        """
        group = self.peers.group()
        if group is None:
            self._find_untiled([self.own.gradients])
            return dict(sums)
        for name, one in sums.items():  # whoever raises here is missed at the gathering, which is bounded
            if one is not None:
                part = self.own.part(name, one)
                self.alone[name] = sketch(one if part is None else part)
        lengths = {name: length_in_pieces(one) for name, one in sums.items() if one is not None}
        what = "which parameters of replicas have gradients"
        told = lengths, self.own.gradients, self.hooks
        every_told = self.exchange.gather(told, what=what, bound_s=self.peers.bound_s)
        there: list[dict[str, float]] = [one for one, _, _ in every_told]
        self._find_untiled([every_told[rank][1] for rank in self.peers.ranks])
        hooks = [every_told[rank][2] for rank in self.peers.ranks]
        self.hooks = {n: one for n, one in self.hooks.items() if all(those.get(n) == one for those in hooks)}
        given = sorted({name for rank in self.peers.ranks for name in there[rank]})
        found = dict[str, Tensor]()
        first = dict[int, str]()  # by parameter, the first of its names
        for name in given:
            known = first.setdefault(id(self.own.parameters[name]), name)
            found[name] = found[known] if known in found else self._sum(group, sums.get(name), name)
        for name, one in found.items():
            every = [there[rank].get(name, 0.0) for rank in self.peers.ranks]
            replicas = len(every) // self.together
            self._lengths[name] = _Lengths(
                lengths.get(name, 0.0), sum(every) / self.together, length_in_pieces(one), replicas
            )
        return {**dict.fromkeys(sums), **found}

    def _find_untiled(self, parts: Sequence[Mapping[str, Shard]]) -> None:
        """Find gradients of which ``parts``, those of all peers, are not all: a rank without one has it whole.

        One of which no rank has anything is no gradient.
        """
        for name in dict.fromkeys(name for one in parts for name in one):
            if not all(name in one for one in parts):
                continue
            if not any(one[name].count for one in parts):
                del self.own.gradients[name]
            else:
                size = (math.prod(self.own.own.shapes[name]),)
                if why := untiled([replace(one[name], shape=size) for one in parts]):
                    self.untiled[name] = why

    def floor(self, name: str, own: Floor) -> Floor:
        """What rounding does to the sum of all replicas, where it does ``own`` to this one's: as much to each.

        That is enough where a hook's type rounds as it was seen to. In another order it rounds otherwise, and of many
        ranks each rounds once more.
        """
        found, cast = self._of_sum(name, own), self._casts.get(id(self.own.parameters[name]))
        if cast is None:
            return found
        narrow, off = precision_of(cast[0]), cast[1]
        more = max(off, narrow.unit / 2) * math.sqrt(len(self.peers.ranks) / 2)
        precision = replace(narrow, least=found.precision.least)
        return replace(found, rounding=max(found.rounding, more), precision=precision, sums=found)

    def size(self, name: str, own: Tensor) -> float:
        """The norm of what this replica has summed up; ``own``: that, if it was not used up for the sum of all."""
        return self._lengths[name].own if name in self.alone else length_in_pieces(own)

    def _of_sum(self, name: str, own: Floor) -> Floor:
        lengths = self._lengths.get(name)
        if (narrow := self.own.reduced_in.get(name)) is not None:
            own = own.through(narrow)
        if lengths is None or not lengths.whole:
            return own
        size = own.size * lengths.replicas
        if own.noise and lengths.whole <= own.precision.factor * size:
            return replace(own, size=size)
        grown = lengths.every / lengths.whole
        least = size / lengths.whole if own.noise else own.precision.least / own.precision.factor * grown
        return replace(
            own,
            permutation=own.permutation * grown,
            rounding=max(own.rounding * grown, least),
            nudged=own.nudged * grown,
            led=own.led * grown,
            fault=own.fault * lengths.own / lengths.whole,
            size=0.0,
            sums=None if own.sums is None else self.floor(name, own.sums),
        )

    def may_be_of(self, hook: CommHook, name: str, seen: Tensor, due: Tensor) -> bool:
        """Whether ``hook`` may have made what was ``seen`` of what is ``due``.

        No type rounds as much as no floor excuses. None makes a multiple of it, or of this replica's own.
        """
        if hook.narrow is not None:
            return error(seen, due) <= precision_of(hook.narrow).most
        here, own = sketch(seen), self.alone.get(name)
        return here.factor(sketch(due)) is None and (own is None or here.factor(own) is None)

    def causes(
        self,
        stage: int,
        wrong: Mapping[str, tuple[Tensor | None, Tensor | None]],
        begun: Mapping[str, Tensor | None],
        scale: float,
    ) -> Iterator[Cause]:
        """What is wrong with gradients of a stage, each with what is due of it, where that is one thing for all.

        ``begun``: what they were before the step. All are as they are before sums are divided by ``scale``.
        """
        at, factors = Cause("not-reduced", rank=self.exchange.rank, stage=stage), set[float | None]()
        pairs = {
            name: (sketch(seen), sketch(due))
            for name, (due, seen) in wrong.items()
            if due is not None and seen is not None
        }
        if not pairs or len(pairs) < len(wrong):
            return
        own = {name: seen.factor(self.alone[name]) for name, (seen, _) in pairs.items() if name in self.alone}
        if len(own) == len(pairs) and all(near(one, 1.0) or near(one, scale) for one in own.values()):
            every = [name for name, of in self.own.own.places.items() if of == stage]
            some = "" if len(pairs) == len(every) else f" of {first_few(list(pairs))}"
            yield replace(at, detail=f"its gradients{some} are those of its own microbatches alone")
            return
        before = {name: one for name in pairs if (one := begun.get(name)) is not None}
        larger = len(before) == len(pairs) and not any(near(seen.factor(due), 1.0) for seen, due in pairs.values())
        all_or_one = (1, self.replicas, 1 / self.replicas)  # they may have been added up once more, or be of one alone
        for times in all_or_one if larger else ():
            left = {name: _without(wrong[name][1], one, times) for name, one in before.items()}
            if all(near(one.factor(pairs[name][1]), 1.0) for name, one in left.items()):
                told = replace(at, kind="stale-gradient", detail=f"{STALE}, {times:g} times")
                yield replace(told, rank=None, detail=f"{told.detail}: {_BY_ONE}") if times < 1 else told
                return
        for seen, due in pairs.values():
            factor = seen.factor(due)
            factors.add(None if factor is None else float(f"{factor:.4g}"))
        if len(factors) == 1 and (factor := factors.pop()) is not None and not near(factor, 1.0):
            alone = next(iter(pairs)) if len(pairs) == 1 else None
            yield replace(at, kind="scale", factor=factor, detail=f"{factor:g} times", parameter=alone)

    @property
    def replicas(self) -> int:
        """How many there are of what this rank has."""
        return len(self.peers.ranks) // self.together

    def _sum(self, group: dist.ProcessGroup, own: Tensor | None, name: str) -> Tensor:
        """The sum of one parameter, as the type of its hook rounds it; how far that is off is noted."""
        hook = self.hooks.get(name)
        if hook is None or hook.narrow is None or self.together > 1:
            return self._reduced(group, own, name)
        ranks = len(self.peers.ranks)
        cast = self._reduced(group, None if own is None else hook.cast(own, ranks), name)
        whole = self._reduced(group, own, name)
        made = hook.whole(cast, ranks)
        self._casts[id(self.own.parameters[name])] = hook.narrow, error(made, whole)
        return made

    def _reduced(self, group: dist.ProcessGroup, own: Tensor | None, name: str) -> Tensor:
        """The sum of one parameter, of which this replica may have nothing."""
        if own is None:
            held = self.own.own.parameters[name]
            own = held.new_zeros(self.own.own.shapes[name])
        wide = own.to(_WIDE.get(own.dtype, own.dtype)).contiguous()
        dist.all_reduce(wide, group=group)
        return (wide if self.together == 1 else wide / self.together).to(own.dtype)


def _without(seen: Tensor | None, before: Tensor, times: float) -> Sketch:
    """What is left of what was ``seen`` without what was there ``before``."""
    assert seen is not None, "there is a sketch of it"
    return sketch(seen - times * before.to(seen.device, seen.dtype).view_as(seen))
