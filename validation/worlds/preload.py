"""What the fork server imports once, so that every worker after that starts in milliseconds."""

import contextlib
import importlib

import pipeproof.worlds.worker  # noqa: F401

# Most jobs run a pipeline step. Where it cannot be imported, the job that wants it says so better than we could here.
with contextlib.suppress(Exception):
    importlib.import_module("pipeproof.pipeline.step")
