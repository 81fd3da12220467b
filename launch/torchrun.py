"""Start torchrun, and exit as the rank did that failed first.

    python launch/torchrun.py --nnodes 2 --node-rank 0 --nproc-per-node 8 ... train.py ...

torchrun exits with 1 whatever has ended its ranks, so that a scheduler cannot tell a mistake, after
which every restart fails again (exit code 2), from a node that was lost. It also ends each stop
that a signal asked for with two tracebacks.
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

# Of a process that a signal has ended, as shells report it.
SIGNALED = 128


def main(arguments: list[str]) -> int:
    """Run torchrun's command line; return the exit code."""
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:
            return SIGNALED - failure.exitcode
        return failure.exitcode
    except SignalException as error:
        return SIGNALED + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
