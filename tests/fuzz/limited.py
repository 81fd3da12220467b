"""Run a script with limits of memory and CPU time, and with what is a pool of processes elsewhere in this one."""

import os
import re
import resource
import runpy
import sys
import tempfile
from pathlib import Path

from shard_making import run_here

from adamae.shard_tools.workers import ENGINES

SECONDS = 10  # of processor time, imports done
MEMORY = 2**30  # bytes beyond what the imports take

if __name__ == "__main__":
    used = 1024 * int(re.search(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text())[1])
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    ENGINES["processes"] = run_here  # a pool's processes would import everything again
    tempfile.tempdir = os.environ["HOME"]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
