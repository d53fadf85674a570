"""One part of `ci/accelerator`, in a process of its own that can be ended: its rows go to a file as they are found.

The last line says how the part ended. Arguments: the part, the file, and what is wanted, as JSON.
"""

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from accelerator_parts import PARTS, NotRun, Wanted
from accelerator_result import Row


def main(name: str, path: str, text: str) -> None:
    """Run the part."""
    part, wanted = PARTS[name], Wanted(**json.loads(text))
    with Path(path).open("a", buffering=1) as file:

        def tell(row: Row) -> None:
            file.write(json.dumps(asdict(row)) + "\n")

        ended, reason = "done", ""
        try:
            if lacking := [package for package in part.needs if find_spec(package) is None]:
                raise NotRun(f"it needs {lacking[0]}: install it, or name a folder that has it in PYTHONPATH")
            part.run(wanted, tell)
        except NotRun as why:
            ended, reason = "not run", str(why)
        file.write(json.dumps({"ended": ended, "reason": reason}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
