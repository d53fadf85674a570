"""Fork server imports, done once so that workers start within milliseconds."""

import contextlib
import importlib

import pipeproof.worlds.worker  # noqa: F401

# Most jobs run a pipeline step. If its import fails, the job reports it better than we could here.
with contextlib.suppress(Exception):
    importlib.import_module("pipeproof.pipeline.step")
