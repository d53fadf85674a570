"""The functional pipeline: what is right in it, and its faults."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import truth_trial as trials
from runtime_functional import Way
from runtime_partial import step as in_parts
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from truth_check import RIGHT, Run, Truth
from truth_faults import PAIRED, backward, forward, other, sums
from truth_models import Pairs, loss_fn, some
from truth_steps import shapes_of_zeros
from truth_trial import COUNT, TWICE, Split, keyed, steps, unequal

MESH = {"pp": 2, "dp": 2}
LAST = COUNT - 1


trial, fault = partial(trials.trial, "functional"), partial(trials.fault, "functional")


# What else a step does, and changes nothing by.


def shapes_on_meta(stage: nn.Module, pairs: Pairs) -> None:
    weights = {n: p.detach().to("meta") for n, p in stage.named_parameters()}
    functional_call(stage, weights, (torch.empty_like(pairs[0][0], device="meta"),))


def shapes_of_fakes(stage: nn.Module, pairs: Pairs) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        weights = {n: mode.from_tensor(p.detach()) for n, p in stage.named_parameters()}
        functional_call(stage, weights, (mode.from_tensor(pairs[0][0]),))


def derivative_along_the_input(stage: nn.Module, pairs: Pairs) -> None:
    x = pairs[0][0]
    jvp(lambda one: functional_call(stage, dict(stage.named_parameters()), (one,)), (x,), (torch.ones_like(x),))


def gradients_of_rows(stage: nn.Module, pairs: Pairs) -> None:
    x, target = pairs[0]
    weights = {n: p.detach() for n, p in stage.named_parameters()}
    vmap(grad(lambda w, a, b: loss_fn(functional_call(stage, w, (a,)), b)), (None, 0, 0))(weights, x, target)


def average_of_weights(stage: nn.Module, pairs: Pairs) -> None:
    with torch.no_grad():
        deepcopy(stage).eval()(pairs[0][0])


def products_in_two_parts(stage: nn.Module, pairs: Pairs) -> None:
    for layer in stage.children():
        if isinstance(layer, Split):
            layer.cut = True


def other_key_again(stage: nn.Module, pairs: Pairs) -> None:
    if dist.get_rank() == 1:
        for layer in stage.children():
            layer.shift = 1  # type: ignore[assignment]


def of_ways() -> Iterator[Run]:
    """Ways to differentiate, and orders."""
    for by in ("grad", "vjp", "value", "again"):
        yield trial(f"right, {by}", by=by)
        yield trial(f"right, {by}, last in first out", by=by, order="lifo")
    yield trial("right, all forwards first", order="afab")
    yield trial("right, grad", against="own")
    yield trial("right, vjp", by="vjp", against="own")
    yield trial("right, one rank", ranks=1, by="vjp")
    yield trial("right, six ranks", ranks=6)
    yield trial("right, two chunks", ranks=3, chunks=2)
    yield trial("right, two chunks, vjp, last in first out", ranks=3, chunks=2, by="vjp", order="lifo")
    yield trial("right, loss scaled and back", scale=1024.0)
    yield trial("right, clipped", max_norm=0.1, **steps())
    yield trial("right, written to .grad", handed="written")
    for by in ("grad", "vjp", "again"):
        yield trial(f"right, {by}", by=by, against="itself")
    yield trial("right, loss scaled and back", scale=1024.0, against="itself")
    yield trial("right, loss scaled and back, vjp", scale=1024.0, by="vjp")


def of_padding() -> Iterator[Run]:
    """Microbatches of weight zero, rows that are cut off, replicas with unequal numbers."""
    for name, place in {"first": 0, "in the middle": 3, "last": COUNT}.items():
        yield trial(f"right, padding {name}", pads=(place,))
    yield trial("right, padding at both ends, vjp", pads=(0, COUNT + 1), by="vjp")
    yield trial("right, padding last", pads=(COUNT,), against="itself")
    yield trial("right, padding on all replicas", pads=(2,), replicas=2, ranks=TWICE, model="four")
    yield trial("right, one replica filled up", fill=4, ranks=TWICE, **unequal())
    yield trial("right, one replica filled up, a mesh", fill=4, ranks=MESH, **unequal())
    yield trial("right, one replica has more", ranks=TWICE, **unequal())
    ragged = some(4, 6, 3, 5, 6, 2)
    yield trial("right, rows filled up", rows=6, data=ragged)
    yield trial("right, rows filled up, vjp, last in first out", rows=6, data=ragged, by="vjp", order="lifo")
    yield trial("right, rows filled up", rows=6, data=ragged, against="itself")


def of_models() -> Iterator[Run]:
    """Weights that are frozen, shared or in copies; modes and types."""
    yield trial("right, frozen first stage", model="frozen first")
    yield trial("right, frozen layer, vjp", model="frozen middle", by="vjp")
    yield trial("right, tied", model="tied")
    yield trial("right, tied, sgd twice", model="tied", **steps("train", "train"))
    yield trial("right, dropout by a key", model="dropout", data=keyed())
    yield trial("right, dropout by a key, again", model="dropout", data=keyed(), by="again")
    yield trial("right, autocast", model="autocast")
    for ranks in (TWICE, MESH):
        for by in ("grad", "vjp"):
            kind = "a mesh" if ranks is MESH else "replicas"
            yield trial(f"right, {kind}, {by}", replicas=2, ranks=ranks, model="four", by=by)
    for handed in ("flat", "flat alone"):
        yield trial(f"right, replicas, handed back {handed}", replicas=2, ranks=TWICE, model="four", handed=handed)
    yield trial("right, replicas", replicas=2, ranks=TWICE, model="four", against="itself")
    yield trial("right, tied", model="tied", against="itself")
    yield trial("right, two chunks", ranks=3, chunks=2, against="itself")
    yield trial("right, replicas, flat", replicas=2, ranks=TWICE, model="four", handed="flat", against="itself")


def of_parts(name: str, truth: Truth = RIGHT, *, summed: bool) -> Iterator[Run]:
    """Halves of layers, on two ranks each; what a stage sends back is whole, or a part."""
    for by, alone in (("grad", False), ("again", False), ("grad", True)):
        step = partial(in_parts, way=Way(by=by), summed=summed, alone=alone)
        title = f"{name}, {'its module unseen' if alone else by}"
        yield trial(title, truth, step=step, ranks={"pp": 2, "tp": 2}, model="wide")


def of_steps() -> Iterator[Run]:
    """Several operations, and what is done around them."""
    for name, by in {"sgd": "vjp", "momentum": "grad", "adam": "grad"}.items():
        yield trial(f"right, {name} three times", by=by, **steps("train", "train", "train", by=name))
    between = steps("train", "eval", "train")
    yield trial("right, evaluation between", by="vjp", **between)
    yield trial("right, accumulated", **steps("accumulate", "train"))
    yield trial("right, clipped adam", max_norm=0.1, **steps("train", "train", by="adam"))
    yield trial("right, batch norms", model="norms", **between)
    yield trial("right, evaluation in bf16", model="eval in bf16", **between)
    parts = {"model": "eval in bf16", "around": products_in_two_parts}
    yield trial("right, evaluation in bf16 in two parts", **parts, **between)
    yield trial("right, dropout between", model="dropout", data=keyed(3 * COUNT), **between)
    for around in (
        *(shapes_of_zeros, shapes_on_meta, shapes_of_fakes, derivative_along_the_input, gradients_of_rows),
        average_of_weights,
    ):
        yield trial(f"right, {around.__name__}", around=around)


def rights() -> tuple[Run, ...]:
    """Every row without a fault."""
    return (
        *(*of_ways(), *of_padding(), *of_models(), *of_steps()),
        *of_parts("right, halves of layers", summed=True),
    )


def in_ways(name: str, truth: Truth, *ways: str, **how: Any) -> Iterator[Run]:
    """A fault in several ways: "" as it is, "vjp" by that, "itself" against itself."""
    for way in ways:
        more = {"": {}, "vjp": {"by": "vjp", "title": f"{name}, vjp"}, "itself": {"against": "itself"}}[way]
        yield fault(name, truth, **how, **more)


def of_messages() -> Iterator[Run]:
    """What goes wrong between stages and in forwards."""
    crossed = forward(
        "wrong-message",
        1,
        2,
        wrong="swapped messages",
        microbatches=(1, 2),
        alike=("swapped-data", "swapped-activations", "mispaired"),
    )
    yield from in_ways("two messages crossed", crossed, "", "vjp", "itself")
    yield fault("third message altered", forward("altered", 1, 2, microbatches=(2,), alike=("computation",)))
    yield fault("messages in bf16", forward("rounded", 1, 2, alike=("computation",)))
    yield fault("messages in bf16", forward("rounded", 1, 2), against="itself")
    yield fault("target of the next", forward("swapped-data", 0, 2, wrong="swapped", somewhere=True), at=(2,))
    yield fault("not divided", backward("scale", 2, wrong="scale", somewhere=True, factors=(6.0,)), at=(2,))
    yield fault("not divided", sums("scale", wrong="scale", factors=(6.0,)), at=(2,), against="itself")
    yield fault("losses reversed", other("report", "report", 2), at=(2,))
    again = backward(("randomness", "computation", "altered", "extra-term"), 1)
    yield trial("recomputed with another key", again, model="dropout", data=keyed(), by="again", around=other_key_again)
    rows = {"rows": 6, "data": some(4, 6, 3, 5, 6, 2)}
    yield fault(
        "third message altered",
        forward("altered", 1, 2, microbatches=(2,), alike=("computation",)),
        title="altered, rows filled up",
        **rows,
    )
    weighs = sums(("doubled", "unequal-weights", "scale"), wrong="doubled order scale boundary", microbatches=(0,))
    yield fault("padding weighs half", weighs, pads=(COUNT,), at=())


def of_backwards() -> Iterator[Run]:
    """What goes wrong in backwards."""
    yield from in_ways("newest pullback", backward(PAIRED, 1, wrong="swapped"), "", "vjp")
    yield fault("newest pullback", backward(PAIRED, 0, 1, wrong="swapped"), against="itself")
    closure = backward((*PAIRED, "dropped"), 1, wrong="swapped dropped sums order")
    yield fault("last closure for all", closure, by="again", order="afab")
    yield from in_ways("last closure for all", closure, "vjp", order="afab")
    yield fault(
        "cotangent of ones",
        backward(("altered", "computation", "wrong-message", "extra-term", "mispaired"), 1, 2, wrong="messages"),
    )
    stopped = backward(
        ("uninitialised", "altered", "zero", "dropped"),
        0,
        1,
        wrong="dropped",
        microbatches=(2,),
        affected=(0,),
    )
    yield from in_ways("input gradient stopped", stopped, "", "itself")
    yield fault("input gradients quartered", backward("scale", 0, 1, wrong="scale", factors=(0.25,), affected=(0,)))
    crossed = backward(("wrong-message", *PAIRED), 0, 1, wrong="swapped messages", microbatches=(1, 2), affected=(0,))
    yield from in_ways("two gradients crossed", crossed, "", "vjp")
    yield from in_ways("last not added", sums("dropped", 1, microbatches=(LAST,)), "", "vjp", "itself")
    yield fault("second added twice", sums("doubled", 1, microbatches=(1,)))
    yield fault("sums of the first leaf alone", sums("dropped", 1))
    yield fault("sums in bf16", sums("rounded", 1, wrong="sums reduction"))
    yield fault("gradients negated", sums("sign", 1, wrong="reduction", factors=(-1.0,)))
    yield fault(
        "square gradients transposed",
        sums(("altered", "misplaced"), 1, wrong="reduction", parameter=r"linear\.weight$"),
    )
    yield fault("biases zeroed", sums("zero", 1, wrong="reduction", parameter="bias$"))
    yield fault("gradients through fp16", sums("rounded", 1, wrong="reduction"))
    yield fault("vector cut in another order", sums(("altered", "misplaced"), 1, wrong="reduction"))
    yield fault("norm of its own", other("norm", "norm", 1))


def of_replicas() -> Iterator[Run]:
    """Reductions that are missing, early, narrow or elsewhere."""
    stage = {"replicas": 2, "ranks": TWICE, "model": "four", "at": (2, 3)}
    apart = sums("not-reduced", 1, ranks=(2, 3), wrong="reduction replicas")
    yield from in_ways("never reduced", apart, "", "itself", **stage)
    yield fault(
        "reduced before the last",
        sums(("not-reduced", "dropped", "scale"), 1, ranks=(2, 3), wrong="reduction replicas dropped"),
        **stage,
    )
    doubled = sums("scale", 1, ranks=(2, 3), wrong="scale reduction", factors=(2.0,))
    yield fault("reduced twice", doubled, **stage)
    yield fault("not averaged", doubled, **stage)
    yield fault("reduced in bf16", sums("rounded", 1, ranks=(2, 3), wrong="reduction"), **stage)
    yield fault(
        "reduced over the pipeline",
        sums(("misplaced", "extra-term", "not-reduced"), wrong="reduction replicas"),
        **{**stage, "at": (0, 1, 2, 3)},
    )
    yield fault(
        "tied not summed", sums("tied-not-summed", 0, 2, wrong="tied reduction", parameter="table"), model="tied", at=()
    )
    yield fault(
        "tied sum doubled", sums("tied-doubled", 2, wrong="tied reduction", parameter="table"), model="tied", at=(2,)
    )
    apart = other(("replicas-apart", "randomness"), "weights loss gradients boundary computation", 3)
    for name, ranks in {"a list": TWICE, "a mesh": MESH}.items():
        title = f"replicas drawn apart, {name}"
        yield fault("drawn apart", apart, **{**stage, "at": (3,), "ranks": ranks}, title=title)
    yield fault("drawn apart", apart, **{**stage, "at": (3,)}, against="own", title="replicas drawn apart, a list")


def of_training() -> Iterator[Run]:
    """What goes wrong from one operation to the next."""
    twice = steps("train", "train")
    old = forward("stale-tensor", 1, wrong="stale computation")
    yield from in_ways("weights of the step before", old, "", "vjp", **twice)
    yield fault("weights of the step before", old, model="autocast", title="old weights under autocast", **twice)
    small = {**steps("train", "train", by="slow sgd"), "optimizer": "sgd", "rate": 0.005}
    title = "old weights under autocast, small steps"
    little = sums("stale-tensor", 1, wrong="stale computation", affected=None)
    yield fault("weights of the step before", little, model="autocast", title=title, **small)
    yield fault("sums of the step before", sums("stale-gradient", 1, wrong="stale"), **twice)
    yield fault("update skipped", other(("update", "step-skipped", "clip"), "update", 1), **twice)
    yield fault("not scaled back", sums("scale", 1, wrong="scale", factors=(1024.0,)), scale=1024.0)
    yield fault("clipped by its own norm", other("clip", "clip update", 1), max_norm=0.1, **steps())
    forgotten = other(("update", "clip"), "update clip", 1)
    yield fault("state forgotten", forgotten, **steps("train", "train", by="adam"))
    yield fault("state forgotten", forgotten, title="momentum forgotten", **steps("train", "train", by="momentum"))
    between = steps("train", "eval", "train")
    mode, trains = other("mode", "mode loss", 1), other(("mode", "buffers"), "mode loss", 1)
    yield fault("evaluated in training mode", mode, model="dropout", data=keyed(3 * COUNT), **between)
    yield fault("evaluated in training mode", trains, title="evaluation trains norms", model="norms", **between)
    yield fault("statistics lost", other("buffers", "buffers", 1), model="norms", **between)


def faults() -> tuple[Run, ...]:
    """Every row with a fault."""
    apart = backward(
        ("not-reduced", "computation"), 0, 1, wrong="reduction replicas computation", ranks=(), affected=(0,)
    )
    return (
        *(*of_messages(), *of_backwards(), *of_replicas(), *of_training()),
        *of_parts("a part is sent back", apart, summed=False),
    )
