"""The asynchronous pipeline: what is right in it, and its faults."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import truth_trial as trials
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from truth_check import Run, Truth
from truth_faults import PAIRED, backward, forward, other, sums
from truth_functional import LAST, MESH, average_of_weights, products_in_two_parts
from truth_models import Pairs, through
from truth_steps import shapes_of_zeros
from truth_trial import COUNT, TWICE, Cast, keyed, steps, unequal

trial, fault = partial(trials.trial, "async"), partial(trials.fault, "async")


# Ways to call a stage, and what else is called.


def recomputed(stage: nn.Module, x: Tensor) -> Any:
    return checkpoint(stage, x, use_reentrant=False)


def recomputed_reentrant(stage: nn.Module, x: Tensor) -> Any:
    return checkpoint(stage, x if x.requires_grad else x.detach().requires_grad_(), use_reentrant=True)


def offloaded() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


def packed_narrowly() -> AbstractContextManager[Any]:
    narrow = through(torch.bfloat16)
    return saved_tensors_hooks(lambda t: narrow(t) if t.is_floating_point() else t, lambda t: t)


def a_metric(stage: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        stage(x)


def shapes_on_meta(stage: nn.Module, pairs: Pairs) -> None:
    deepcopy(stage).to("meta")(torch.empty_like(pairs[0][0], device="meta"))


def gradients_logged(stage: nn.Module, pairs: Pairs) -> None:
    for layer in stage.children():
        layer.register_full_backward_hook(lambda *_: None)
    for parameter in stage.parameters():
        parameter.register_hook(lambda g: None)


def activations_logged(stage: nn.Module, pairs: Pairs) -> None:
    for layer in stage.children():
        layer.register_forward_hook(lambda module, given, made: None)
        layer.register_forward_pre_hook(lambda module, given: (given[0].view_as(given[0]),))


def old_casts(stage: nn.Module, pairs: Pairs) -> None:
    for layer in stage.children():
        if isinstance(layer, Cast):
            layer.keeps = True


PLAIN, BETWEEN = steps("train", "train"), steps("train", "eval", "train")
REPLICAS = {"replicas": 2, "ranks": TWICE, "model": "four"}


def of_messages() -> Iterator[Run]:
    """Ways to send and to receive, orders and threads."""
    yield trial("right, posted")
    yield trial("right, posted", against="own")
    yield trial("right, thread", receive="thread")
    yield trial("right, greedy", greedy=True)
    yield trial("right, greedy thread", greedy=True, receive="thread")
    yield trial("right, rings of two buffers", slots=2)
    yield trial("right, rings of one buffer, greedy", slots=1, greedy=True)
    yield trial("right, worker", worker=True)
    yield trial("right, greedy worker and thread", worker=True, greedy=True, receive="thread")
    yield trial("right, two halves of rows", halves=True)
    yield trial("right, recomputed", call=recomputed)
    yield trial("right, recomputed, reentrant", call=recomputed_reentrant)
    yield trial("right, recomputed on a worker", call=recomputed, worker=True)
    yield trial("right, saved tensors offloaded", around=offloaded)
    yield trial("right, in place", model="in place")
    yield trial("right, weight norm", model="weight norm")
    yield trial("right, frozen first stage", model="frozen first")
    yield trial("right, six ranks, greedy", ranks=6, greedy=True)
    for name, how in {
        **{"posted": {}, "greedy thread": {"greedy": True, "receive": "thread"}, "recomputed": {"call": recomputed}},
        **{"two halves of rows": {"halves": True}, "in place": {"model": "in place"}},
    }.items():
        yield trial(f"right, {name}", **how, against="itself")


def of_reductions() -> Iterator[Run]:
    """Replicas, their reductions behind backwards, and gradients that lie elsewhere."""
    for reduce in ("end", "hooks"):
        yield trial(f"right, replicas, {reduce}", **REPLICAS, reduce=reduce)
    yield trial("right, replicas, hooks, greedy", **REPLICAS, reduce="hooks", greedy=True)
    yield trial("right, a mesh, hooks", **{**REPLICAS, "ranks": MESH}, reduce="hooks")
    yield trial("right, replicas, hooks", **REPLICAS, reduce="hooks", against="itself")
    for main in ("parameter", "module"):
        yield trial(f"right, main gradients of the {main}", main=main)
        yield trial(f"right, main gradients of the {main}, twice", main=main, **PLAIN)
    yield trial("right, replicas, hooks, main gradients", **REPLICAS, reduce="hooks", main="parameter")
    yield trial("right, main gradients of the parameter", main="parameter", against="itself")
    yield trial("right, main gradients of the module", main="module", against="itself")
    yield trial("right, main gradients accumulated", main="parameter", **steps("accumulate", "train"))
    for name, place in {"first": 0, "in the middle": 3, "last": COUNT}.items():
        yield trial(f"right, padding {name}", pads=(place,), greedy=True)
    yield trial("right, padding in the middle", pads=(3,), against="itself")
    yield trial("right, one replica filled up", fill=4, ranks=TWICE, **unequal())
    yield trial("right, one replica filled up, hooks", fill=4, ranks=TWICE, reduce="hooks", **unequal())
    yield trial("right, one replica filled up", fill=4, ranks=TWICE, against="itself", **unequal())
    yield trial("right, loss scaled and back", scale=1024.0)


def of_training() -> Iterator[Run]:
    """Several operations: weights that come late, evaluations, optimizers, clipping."""
    yield trial("right, weights written late", late=True, **PLAIN)
    yield trial("right, weights written late, evaluation between", late=True, **BETWEEN)
    yield trial("right, weights written late on a worker", late=True, worker=True, **PLAIN)
    yield trial("right, weights gathered late", gathered=True, **REPLICAS, **PLAIN)
    yield trial("right, weights gathered late, evaluation between", gathered=True, **REPLICAS, **BETWEEN)
    yield trial("right, weights gathered late, one step", gathered=True, **REPLICAS)
    yield trial("right, clipped adam", max_norm=0.1, **steps("train", "train", "train", by="adam"))
    yield trial("right, momentum", **steps("train", "train", "train", by="momentum"))
    yield trial("right, batch norms", model="norms", **BETWEEN)
    yield trial("right, evaluation in inference mode", evaluation=torch.inference_mode, **BETWEEN)
    narrow = {"model": "eval in bf16", **BETWEEN}
    yield trial("right, evaluation in bf16", **narrow)
    yield trial("right, evaluation in bf16 in two parts", before=products_in_two_parts, **narrow)
    yield trial("right, dropout by a key, recomputed", model="dropout", data=keyed(), call=recomputed)
    yield trial("right, autocast", model="autocast", **PLAIN)
    yield trial("right, autocast in two parts", model="autocast", before=products_in_two_parts, **PLAIN)
    for before in (shapes_of_zeros, shapes_on_meta, gradients_logged, activations_logged, average_of_weights):
        yield trial(f"right, {before.__name__}", before=before)
    yield trial("right, a metric after each forward", between=a_metric)


def of_itself() -> Iterator[Run]:
    """What is held against itself: stages run again, with what they had."""
    for name, how in {
        "weights gathered late": {"gathered": True, **REPLICAS},
        "dropout by a key, recomputed": {"model": "dropout", "data": keyed(), "call": recomputed},
        "batch norms": {"model": "norms"},
        "autocast": {"model": "autocast"},
        "saved tensors offloaded": {"around": offloaded},
        "loss scaled and back": {"scale": 1024.0},
        "a metric after each forward": {"between": a_metric},
        "worker": {"worker": True},
        **{one.__name__: {"before": one} for one in (shapes_of_zeros, activations_logged, average_of_weights)},
    }.items():
        yield trial(f"right, {name}", **how, against="itself")


def rights() -> tuple[Run, ...]:
    """Every row without a fault."""
    return (*of_messages(), *of_reductions(), *of_training(), *of_itself())


def both(name: str, truth: Truth, **how: Any) -> Iterator[Run]:
    """A fault beside the reference, and against itself."""
    yield fault(name, truth, **how)
    yield fault(name, truth, **how, against="itself")


def in_flight() -> Iterator[Run]:
    """Buffers that are written or read too early, and messages."""
    one_buffer = backward("overwritten", 1, wrong="swapped memory", alike=("swapped-activations", "mispaired"))
    yield from both("received into one buffer", one_buffer)
    early = forward(
        ("wrong-message", "overwritten", "swapped-activations", "doubled"),
        0,
        1,
        wrong="swapped memory messages",
        alike=("swapped-data",),
    )
    yield fault("sent out of one buffer", early, at=(0,))
    unread = backward(("uninitialised", "altered"), 1, wrong="dropped", microbatches=(2,), alike=("dropped",))
    yield fault("read before it came", unread)
    yield fault(
        "third without gradient",
        backward(("dropped", "uninitialised", "zero"), 0, 1, wrong="dropped", microbatches=(2,), affected=(0,)),
    )
    yield fault("messages in fp16", forward("rounded", 1, 2, alike=("computation",)))
    yield fault(
        "fourth message altered", forward(("scale", "altered"), 1, 2, microbatches=(3,), alike=("computation",))
    )
    yield fault("fourth message altered", forward(("scale", "altered"), 1, 2, microbatches=(3,)), against="itself")
    late = forward("swapped-data", 0, 2, wrong="swapped", somewhere=True)
    yield fault("target of a late closure", late, at=(2,), worker=True)
    yield fault(
        "not divided", backward("scale", 2, wrong="scale", somewhere=True, factors=(6.0,)), at=(2,), greedy=True
    )
    yield fault("newest graph", backward(PAIRED, 1, wrong="swapped"), ranks=4, model="four")
    yield fault("newest graph", backward(PAIRED, 0, 1, wrong="swapped"), ranks=4, model="four", against="itself")
    yield fault("last graph left", backward("dropped", 0, 1, wrong="dropped sums order", microbatches=(LAST,)))
    halved = backward("scale", 0, 1, wrong="scale", factors=(0.5,), affected=(0,))
    yield from both("gradients halved on their way", halved)
    partly = backward(
        ("altered", "dropped", "uninitialised", "overwritten", "zero"), 0, 1, wrong="dropped", affected=(0,)
    )
    yield from both("first half sent back", partly)
    yield trial(
        "saved in bf16", backward(("rounded", "computation"), 0, 1, 2, wrong="computation sums"), around=packed_narrowly
    )
    weighs = sums(("doubled", "unequal-weights", "scale"), wrong="doubled order scale boundary", microbatches=(0,))
    yield fault("padding weighs half", weighs, pads=(3,), at=())


def of_sums() -> Iterator[Run]:
    """What goes wrong with gradients that were computed right."""
    of_stage = {**REPLICAS, "at": (2, 3)}
    apart = sums("not-reduced", 1, ranks=(2, 3), wrong="reduction replicas")
    early = sums(("not-reduced", "dropped"), 1, ranks=(2, 3), wrong="reduction replicas dropped sums")
    yield fault("never reduced", apart, **of_stage)
    yield from both("reduced before the last", early, **of_stage, reduce="hooks")
    yield fault(
        "reduced again",
        sums("scale", 1, ranks=(2, 3), wrong="scale reduction", factors=(2.0,)),
        **of_stage,
        reduce="hooks",
    )
    yield fault("reduced in bf16", sums("rounded", 1, ranks=(2, 3), wrong="reduction"), **of_stage)
    yield fault(
        "reduced over the pipeline",
        sums(("misplaced", "extra-term", "not-reduced"), wrong="reduction replicas"),
        **{**of_stage, "at": (0, 1, 2, 3)},
    )
    unreduced = sums(("not-reduced", "altered"), 1, ranks=(2,), wrong="reduction replicas")
    yield fault("reduction not waited for", unreduced, **{**of_stage, "at": (2,)})
    bias = sums("not-reduced", 1, ranks=(2, 3), wrong="reduction replicas", parameter=r"^2\.norm\.bias$")
    yield fault("a bias without its hook", bias, **of_stage, reduce="hooks")
    yield fault("copied over", sums("dropped", 1, microbatches=tuple(range(LAST))), main="parameter")
    yield fault("gradients left behind", sums(("doubled", "scale"), 1, wrong="doubled scale"), main="module")
    yield fault("main gradients in bf16", sums("rounded", 1, wrong="reduction"), main="module")
    yield fault("stage doubled", sums("scale", 1, wrong="reduction", factors=(2.0,)))
    yield fault("stage negated", sums("sign", 1, wrong="reduction", factors=(-1.0,)))
    yield fault("gradients through fp16", sums("rounded", 1, wrong="reduction"))
    yield fault("not scaled back", sums("scale", 1, wrong="scale", factors=(1024.0,)), scale=1024.0)
    drawn = other(("replicas-apart", "randomness"), "weights loss gradients boundary computation", 3)
    apart = {**REPLICAS, "at": (3,), "title": "replicas drawn apart, a list"}
    yield fault("drawn apart", drawn, **apart)
    yield fault("drawn apart", drawn, **apart, against="own")
    yield fault("drawn apart", drawn, **{**apart, "ranks": MESH, "title": "replicas drawn apart, a mesh"})


def between_steps() -> Iterator[Run]:
    """What goes wrong from one operation to the next."""
    stale = sums("stale-gradient", 1, wrong="stale")
    for main in ("parameter", "module"):
        title = f"main gradients of the {main} not cleared"
        yield fault("main gradients not cleared", stale, main=main, **PLAIN, title=title)
    old = forward("stale-tensor", 1, wrong="weights stale computation")
    yield fault("late weights forgotten", old, late=True, **PLAIN)
    half = forward("stale-tensor", 1, ranks=(2, 3), wrong="weights stale computation")
    yield fault("gathered before the update", half, **REPLICAS, **PLAIN, gathered=True, at=(3,))
    casts = {"model": "autocast", "before": old_casts}
    every_stage = forward("stale-tensor", 0, 1, 2, wrong="stale computation", somewhere=True)
    yield trial("old casts of weights", every_stage, **casts, **PLAIN)
    little = sums("stale-tensor", 0, 1, 2, wrong="stale computation", somewhere=True, faint=True)
    small = steps("train", "train", by="slow sgd")
    yield trial("old casts of weights, small steps", little, **casts, **small)
    yield fault("update skipped", other(("update", "step-skipped", "clip"), "update", 1), **PLAIN)
    yield fault("clipped by its own norm", other("clip", "clip update", 1), max_norm=0.1, **steps())
    mode, trains = other("mode", "mode loss", 1), other(("mode", "buffers"), "mode loss buffers", 1)
    yield fault("evaluated in training mode", mode, model="dropout", data=keyed(3 * COUNT), **BETWEEN)
    yield fault("evaluated in training mode", trains, title="evaluation trains norms", model="norms", **BETWEEN)


def faults() -> tuple[Run, ...]:
    """Every row with a fault."""
    return (*in_flight(), *of_sums(), *between_steps())
