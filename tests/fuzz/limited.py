"""Run a script with limits of memory and CPU time, all in one process."""

import os
import re
import resource
import runpy
import sys
import tempfile
from pathlib import Path

from shard_making import run_here

from adamae.shard_tools.workers import ENGINES

# Of processor time, imports done.
SECONDS = 10
# Bytes beyond what the imports take.
MEMORY = 2**30

if __name__ == "__main__":
    status = Path("/proc/self/status").read_text()
    used_kib = int(re.search(r"VmData:\s*(\d+)", status)[1])
    max_bytes = 1024 * used_kib + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    # The processes of a pool would import everything again.
    ENGINES["processes"] = run_here
    tempfile.tempdir = os.environ["HOME"]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
