"""Run a decode worker: `python -m adamae.pipeline.decoding.start_worker SOCKET FILE`.

The arguments are the numbers of two open files. A module of its own, since signals have to be
ignored before the worker's imports, which take half a second.
"""

import signal
import sys

# Schedulers send these to every process of a job, so that the training process saves what it has
# done.
IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Ignore signals, then make chunks until the loader's process has ended."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    from adamae.pipeline.decoding.decode_worker import run_worker

    run_worker(socket=int(sys.argv[1]), file=int(sys.argv[2]))


if __name__ == "__main__":
    main()
