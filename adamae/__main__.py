"""Run a command of an installed package: `python -m adamae train --config my.yaml`."""

import runpy
import sys

COMMANDS = {
    "train": "adamae.train",
    "evaluate": "adamae.evaluate",
    "extract_features": "adamae.extract_features",
    "visualize": "adamae.visualize",
    "preview": "adamae.preview",
    "export": "adamae.export",
    "doctor": "adamae.doctor",
    "make_shards": "adamae.shard_tools.make_shards",
    "check_shards": "adamae.shard_tools.check_shards",
}


def main() -> None:
    """Run the command that the first argument names, as its file would run with the others."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        usage = f"usage: python -m adamae COMMAND [ARGUMENT ...]\ncommands: {', '.join(COMMANDS)}\n"
        sys.stderr.write(usage)
        sys.exit(0 if name in ("-h", "--help") else 2)
    # Errors and --help name the command as it was called.
    sys.argv[:2] = [f"adamae {name}"]
    runpy.run_module(COMMANDS[name], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
