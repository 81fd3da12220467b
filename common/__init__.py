"""Let idle OpenMP threads sleep: torch's OpenMP reads the variable when it is imported, later.

GNU OpenMP's threads spin at every barrier, hundreds per step, and take the cores from other
processes. On 2 cores shared with three other processes, a tiny model's step took 1.3 s (1.2 s of
CPU time) with PASSIVE and 2.3 s (2.5 s) with spinning threads.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
