"""``python -m pipeproof`` and ``torchrun -m pipeproof`` are the command ``pipeproof``."""

import sys

from pipeproof.cli import main

if __name__ == "__main__":
    sys.exit(main())
