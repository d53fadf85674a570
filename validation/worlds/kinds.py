"""World kinds by name, known to the command line and pytest options before other imports."""

from typing import Any

from pipeproof.extensions import extension, names

REAL, SIMULATED = "real", "simulated"
MOST_RUNS = 10_000  # for simulated ranks, per right pipeline
KINDS = (REAL, *names("worlds"))


def parse_interleaving(text: str) -> Any:
    """Parse an interleaving option. Raises argparse's error for users."""
    world = extension("worlds", SIMULATED)
    assert world is not None, "there is no such option without it"
    return world.parse_interleaving(text)
