"""Works that torch.distributed returns to ranks of a group."""

from torch.distributed import Work


def finish(*works: Work | None) -> None:
    """Wait for all of them."""
    for work in works:
        assert work is not None, "its rank is in the group"
        work.wait()
