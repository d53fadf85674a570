"""``python -m validation`` and ``torchrun -m validation`` are the command ``pipeproof``."""

import sys

from validation.cli import main

if __name__ == "__main__":
    sys.exit(main())
