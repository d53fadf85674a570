"""``python -m pipeproof`` and ``torchrun -m pipeproof`` are the command ``pipeproof``."""

from pipeproof.commands.cli import command

if __name__ == "__main__":
    command()
