"""Build the stand-in for CUDA (fake_cuda.cpp), and run scripts on it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
ROOT = SOURCE.parents[2]
# PyTorch and Triton call functions that SOURCE does not have. These do nothing and succeed; all
# others return cudaErrorNotSupported.
SUCCEED = re.compile(
    r"__cuda|cublas|nccl(Group|Comm)|nvrtc|cuInit|cuCtx|cuFuncSet|cuModuleUnload"
    r"|cuDevicePrimaryCtxRelease|cudaFuncSet|cudaStream(Destroy|Query)|cudaThreadExchange"
    r"|cudaGraph(Exec)?Destroy|cudaMemPool|cudaDeviceEnablePeer"
)
NOT_SUPPORTED = 801
FUNCTION = re.compile(r"\b(?:__cuda[A-Z]\w+|cuda[A-Z]\w+|cu[A-Z]\w+|cublas[A-Z]\w+|nccl[A-Z]\w+)")


def why_not() -> str:
    """Return why the stand-in cannot be built here, or "" if it can."""
    if torch.version.cuda is None:
        return "this build of PyTorch is not for CUDA"
    if not all(map(shutil.which, ("gcc", "g++", "nm"))):
        return "there is no gcc, no g++ or no nm"
    if not any((folder / "cuda_runtime_api.h").exists() for folder in find_headers()):
        return "the wheel nvidia-cuda-runtime, which has CUDA's headers, is missing"
    return ""


def find_headers() -> list[Path]:
    """Return the folders with CUDA's headers: NVIDIA's wheel, then Triton's, which has the rest."""
    folders = []
    for package, include in (("nvidia", "cu13/include"), ("triton", "backends/nvidia/include")):
        spec = find_spec(package)
        if spec is not None:
            folders += [Path(path) / include for path in spec.submodule_search_locations or ()]
    return folders


def list_functions() -> set[str]:
    """Return the functions of CUDA, cuBLAS and NCCL that PyTorch and Triton call."""
    folder = Path(torch.__file__).parent / "lib"
    linked = subprocess.run(
        ["nm", "-D", "--undefined-only", *folder.glob("lib*.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # These look up functions by their names at run time.
    names = (folder / "libc10_cuda.so").read_bytes().decode("latin1")
    driver = (find_headers()[-1].parent / "driver.c").read_bytes().decode("latin1")
    return set(FUNCTION.findall(linked + names + driver))


def build(folder: Path) -> Path:
    """Compile the library into a folder and return its path."""
    source = SOURCE.read_text()
    definitions = []
    for name in sorted(list_functions()):
        if not re.search(rf"\b{name}\b", source):
            result = 0 if SUCCEED.match(name) else NOT_SUPPORTED
            definitions.append(f"int {name}() {{ return {result}; }}\n")
    rest = folder / "rest.c"
    rest.write_text("".join(definitions))
    library = folder / "libcuda.so.1"
    includes = [f"-I{path}" for path in find_headers()]
    shared = ["-O1", "-fPIC", "-w"]
    subprocess.run(["gcc", *shared, "-c", rest, "-o", folder / "rest.o"], check=True)
    subprocess.run(
        [
            "g++",
            *shared,
            "-shared",
            "-std=c++17",
            *includes,
            SOURCE,
            folder / "rest.o",
            "-o",
            library,
            "-ldl",
            "-Wl,-soname,libcuda.so.1",
        ],
        check=True,
    )
    return library


def run(
    library: Path,
    script: str,
    arguments: Sequence[object],
    gpus: int = 1,
    **settings: object,
) -> "subprocess.CompletedProcess[str]":
    """Run a script in the project's root, by torchrun if there is more than one GPU.

    settings: variables of the environment, such as FAKE_CAPABILITY.
    """
    folder = library.parent
    env = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FAKE_NCCL": str(folder),
        "FAKE_GPUS": str(gpus),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # cuDNN looks for the GPU by itself, and finds none.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        # Expandable segments ask NVML about the GPU.
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",
        # If the stand-in aborts, the log names the call.
        "PYTHONFAULTHANDLER": "1",
    }
    env.pop("TRITON_INTERPRET", None)
    env |= {name: str(value) for name, value in settings.items()}
    command = [sys.executable]
    if gpus > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        command += launcher
    command += [script, *map(str, arguments)]
    return subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1400, check=False
    )
