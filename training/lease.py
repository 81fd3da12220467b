"""Who trains in a run folder of an object store, where files cannot be locked."""

import socket
import sys
import threading
import time

from common.errors import InputError
from common.logging import log
from pipeline.reading.storage import ObjectStore

RENEW_S = 10.0
PATIENCE_S = 40.0  # after which a lease that nobody has renewed is nobody's: all of it by the clock of who waits
SETTLE_S = 2.0  # in which two who take a free lease at once both see the second one's name


class TakenOverError(InputError):
    """Another job trains in this run folder."""


class Lease:
    """One object that says whose a run folder is. Its holder counts up in it; no clock is compared with another's."""

    NAME = "lease.txt"

    def __init__(self, bucket: ObjectStore, me: str) -> None:
        self._bucket, self._me, self._beat = bucket, me, 0
        self._released = threading.Event()
        self._thread: threading.Thread | None = None
        self.taken_by = ""

    def take(self) -> None:
        """Raises TakenOverError if somebody else renews it. One that was left is free after PATIENCE_S."""
        seen = self._bucket.read(self.NAME)
        is_ours = seen is not None and self._holder(seen) == self._me  # of a process which has ended: it held the lock
        if seen and not is_ours:
            log(f"{self._bucket.url} is in use by {self._host(seen)}, or was left by it: watching it", file=sys.stderr)
            started = time.monotonic()
            while time.monotonic() < started + PATIENCE_S:
                time.sleep(PATIENCE_S / 20)
                now = self._bucket.read(self.NAME)
                if not now:
                    break
                if now != seen:
                    raise self._taken(now)
        self._renew()
        if not is_ours:
            time.sleep(SETTLE_S)
            self.check()
        self._thread = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises TakenOverError if it is somebody else's by now."""
        now = self._bucket.read(self.NAME)
        if now and self._holder(now) != self._me:
            raise self._taken(now)

    def release(self) -> None:
        """Leave it to others at once, if it was held."""
        self._released.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            try:
                self.check()
                self._bucket.remove(self.NAME)
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
                return  # said by the next sync
            except InputError as error:  # whoever waits has patience for some failures
                log(f"the lease was not renewed: {error}", file=sys.stderr)

    def _renew(self) -> None:
        self._beat += 1
        self._bucket.write(self.NAME, f"{self._me} {socket.gethostname()} {self._beat}".encode())

    def _taken(self, lease: bytes) -> TakenOverError:
        return TakenOverError(
            f"{self._bucket.url} is in use by another training job, on {self._host(lease)}: wait for it, or choose run="
        )

    @staticmethod
    def _holder(lease: bytes) -> str:
        return lease.decode(errors="replace").split(" ")[0]

    @staticmethod
    def _host(lease: bytes) -> str:
        return (lease.decode(errors="replace") + " ?").split(" ")[1]
