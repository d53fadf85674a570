"""What a world can be, by name: a command line and pytest's options know this before anything else is imported."""

from typing import Any

from pipeproof.extensions import extension, names

REAL, SIMULATED = "real", "simulated"
MOST_RUNS = 10_000  # of simulated ranks, of which a right pipeline has one
KINDS = (REAL, *names("worlds"))


def parsed_interleaving(text: str) -> Any:
    """What an option says that decides a simulated run. Raises what argparse tells users of."""
    world = extension("worlds", SIMULATED)
    assert world is not None, "there is no such option without it"
    return world.parsed_interleaving(text)
