"""Advice to make pages of: a model that needs several kinds of parallelism, or one that does not fit."""

from functools import cache

from pipeproof.wings.advise.cluster import ACCELERATORS, Cluster
from pipeproof.wings.advise.layout import Job
from pipeproof.wings.advise.page import Advice
from pipeproof.wings.advise.path import find_path
from pipeproof.wings.advise.search import Allowed, find_layouts
from pipeproof.wings.advise.transformer import MODELS


@cache
def advised(model: str = "llama-3-70b", devices: int = 64) -> Advice:
    """A batch of 128 x 8,192 tokens on H100."""
    job, cluster, allowed = Job(MODELS[model], 128, 8192), Cluster(ACCELERATORS["h100"], devices), Allowed()
    best = find_layouts(job, cluster, allowed).best
    asked = (f"{model}: its sizes", "a batch of 128 x 8,192 tokens")
    ending = ("Begin here.", "Validate:", "pipeproof validate --stack pp=2,tp=2") if best else ("Nothing fits.", "", "")
    return Advice(job, cluster, find_path(job, cluster, allowed), best, asked, *ending, allowed.room)
