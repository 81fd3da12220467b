"""Names of all ops: each has the file of its name."""

from pathlib import Path

from kernels import launch

OPS = sorted(path.stem for path in Path(launch.__file__).parent.glob("*.py") if "\n@triton_op(" in path.read_text())
