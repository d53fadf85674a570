"""``python -m pipeproof`` and ``torchrun -m pipeproof`` are the command ``pipeproof``."""

from pipeproof.cli import command

if __name__ == "__main__":
    command()
