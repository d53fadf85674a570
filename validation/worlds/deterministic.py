"""The same bits on every run, where a device would not give them by itself."""

import os

import torch


def deterministic(device: str) -> None:
    """Make a GPU give the same bits twice; a CPU with one thread does so anyway."""
    if device.startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
