"""Advice to make pages of: a model that needs several kinds of parallelism, or one that does not fit."""

from functools import cache

from pipeproof.pipeline.layouts.cluster import ACCELERATORS, Cluster
from pipeproof.pipeline.layouts.layout import Job
from pipeproof.pipeline.layouts.path import path
from pipeproof.pipeline.layouts.search import Allowed, search
from pipeproof.pipeline.layouts.transformer import MODELS
from pipeproof.reports.page.advice import Advice


@cache
def advised(model: str = "llama-3-70b", devices: int = 64) -> Advice:
    """A batch of 128 x 8,192 tokens on H100."""
    job, cluster, allowed = Job(MODELS[model], 128, 8192), Cluster(ACCELERATORS["h100"], devices), Allowed()
    best = search(job, cluster, allowed).best
    asked = (f"{model}: its sizes", "a batch of 128 x 8,192 tokens")
    ending = ("Begin here.", "Validate:", "pipeproof validate --stack pp=2,tp=2") if best else ("Nothing fits.", "", "")
    return Advice(job, cluster, path(job, cluster, allowed), best, asked, *ending, allowed.room)
