"""How PyTorch's threads wait for each other on a CPU; imported before torch, as OpenMP looks only when it is loaded.

GNU OpenMP's threads spin at every barrier, hundreds of them a step: where other processes want the cores too, the one
that is waited for gets none. On two cores that three other processes use, a tiny model's step took 1.3 s (1.2 s of CPU)
with threads that sleep, 2.3 s (2.5 s of CPU) with threads that spin.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
