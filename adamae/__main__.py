"""`adamae`, the command of an installed package, and `python -m adamae`.

`adamae train --config my.yaml` runs train.py, and so on; see `adamae --help`.
"""

import difflib
import runpy
import sys

from adamae.common import commands
from adamae.common.logging import log


def main() -> None:
    """Run the command that the first argument names, as its file would run with the others."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        for line in commands.list_commands():
            log(line)
        sys.exit(0)
    if name not in commands.COMMANDS:
        similar = difflib.get_close_matches(name, commands.COMMANDS, n=1)
        advice = f"did you mean {similar[0]}? " if similar else ""
        log(f"error: there is no command {name}: {advice}`adamae --help` lists all", sys.stderr)
        sys.exit(2)
    del sys.argv[1]
    # Errors and --help name the command as it was called.
    commands.called_as = f"adamae {name}"
    module = commands.COMMANDS[name].module
    runpy.run_module(f"adamae.{module}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
