"""Lock a run directory in object storage, where files cannot be locked."""

import socket
import sys
import threading
import time

from common.errors import InputError
from common.logging import log
from pipeline.reading.storage import ObjectStore

RENEW_S = 10.0
PATIENCE_S = 40.0  # after which a lease that nobody has renewed is free, by the clock of whoever waits
SETTLE_S = 2.0  # in which two who take a free lease at the same time both see the name of the second


class TakenOverError(InputError):
    """Another job trains in this run directory."""


class Lease:
    """An object that names the holder of a run directory, who counts up in it; no two clocks are compared."""

    NAME = "lease.txt"

    def __init__(self, storage: ObjectStore, holder: str) -> None:
        self._storage, self._holder, self._count = storage, holder, 0
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Take the lease; raise TakenOverError if somebody else renews it. One that was left is free after PATIENCE_S.

        A lease of this holder is of a process which has ended: this one holds the lock of the folder.
        """
        seen = self._storage.read(self.NAME)
        is_ours = seen is not None and _parse(seen)[0] == self._holder
        if seen and not is_ours:
            log(f"{self._storage.url} is in use by {_parse(seen)[1]}, or was left by it: watching it", file=sys.stderr)
            started = time.monotonic()
            while time.monotonic() < started + PATIENCE_S:
                time.sleep(PATIENCE_S / 20)
                now = self._storage.read(self.NAME)
                if not now:
                    break
                if now != seen:
                    raise self._make_error(now)
        self._renew()
        if not is_ours:
            time.sleep(SETTLE_S)
            self.check()
        self._thread = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise TakenOverError if the lease is somebody else's by now."""
        now = self._storage.read(self.NAME)
        if now and _parse(now)[0] != self._holder:
            raise self._make_error(now)

    def release(self) -> None:
        """Leave the directory to others at once, if it was held."""
        self._released.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        try:
            self.check()
            self._storage.remove(self.NAME)
        except TakenOverError:
            return  # theirs by now
        except InputError as error:
            log(f"the next job waits {PATIENCE_S:g} s for the lease of this one: {error}", file=sys.stderr)

    def _keep_renewing(self) -> None:
        while not self._released.wait(RENEW_S):
            try:
                self.check()
                self._renew()
            except TakenOverError:
                return  # raised by the next upload
            except InputError as error:  # whoever waits has patience for some failures
                log(f"the lease was not renewed: {error}", file=sys.stderr)

    def _renew(self) -> None:
        self._count += 1
        self._storage.write(self.NAME, f"{self._holder} {socket.gethostname()} {self._count}".encode())

    def _make_error(self, lease: bytes) -> TakenOverError:
        return TakenOverError(
            f"{self._storage.url} is in use by another training job, on {_parse(lease)[1]}: wait for it, or set run="
        )


def _parse(lease: bytes) -> tuple[str, str]:
    """Return the holder and its host."""
    holder, host, *_ = (lease.decode(errors="replace") + " ? ").split(" ")
    return holder, host
