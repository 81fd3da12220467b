"""Build the GPU that is not there (fake_cuda.cpp), and run scripts on it."""

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
# Of the functions that PyTorch and Triton call and SOURCE has not, these do nothing; others are "not supported" (801).
SUCCEED = re.compile(
    r"__cuda|cublas|nccl(Group|Comm)|nvrtc|cuInit|cuCtx|cuFuncSet|cuModuleUnload|cuDevicePrimaryCtxRelease|cudaFuncSet"
    r"|cudaStream(Destroy|Query)|cudaThreadExchange|cudaGraph(Exec)?Destroy|cudaMemPool|cudaDeviceEnablePeer"
)


def why_not() -> str:
    """Return why it cannot be built here, "" if it can."""
    if torch.version.cuda is None:
        return "this build of PyTorch is not for CUDA"
    if not all(map(shutil.which, ("gcc", "g++", "nm"))):
        return "there is no gcc, no g++ or no nm"
    if not any((folder / "cuda_runtime_api.h").exists() for folder in find_headers()):
        return "the wheel nvidia-cuda-runtime, which has CUDA's headers, is missing"
    return ""


def find_headers() -> list[Path]:
    """Return the folders with CUDA's headers: of NVIDIA's wheel, and of Triton's, which has the rest of them."""
    found = [find_spec(name) for name in ("nvidia", "triton")]
    nvidia, triton = (
        map(Path, spec.submodule_search_locations or ()) if spec else () for spec in found
    )
    return [
        *(place / "cu13/include" for place in nvidia),
        *(place / "backends/nvidia/include" for place in triton),
    ]


def list_functions() -> set[str]:
    """Return the functions of CUDA, cuBLAS and NCCL that PyTorch and Triton look for."""
    libraries = Path(torch.__file__).parent.glob("lib/lib*.so")
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True
    )
    text = listed.stdout + "".join(
        path.read_bytes().decode("latin1")
        for path in (
            Path(torch.__file__).parent / "lib/libc10_cuda.so",
            find_headers()[-1].parent / "driver.c",
        )
    )
    return set(
        re.findall(
            r"\b(?:__cuda[A-Z]\w+|cuda[A-Z]\w+|cu[A-Z]\w+|cublas[A-Z]\w+|nccl[A-Z]\w+)", text
        )
    )


def build(folder: Path) -> Path:
    """Compile the library into a folder and return its path."""
    source = SOURCE.read_text()
    missing = sorted(name for name in list_functions() if not re.search(rf"\b{name}\b", source))
    rest = folder / "rest.c"
    rest.write_text(
        "".join(
            f"int {name}() {{ return {0 if SUCCEED.match(name) else 801}; }}\n" for name in missing
        )
    )
    library = folder / "libcuda.so.1"
    includes = [f"-I{place}" for place in find_headers()]
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
    seconds: float = 300,
    **settings: object,
) -> "subprocess.CompletedProcess[str]":
    """Run a script in the project's root, with more than one GPU by torchrun; settings: of the environment."""
    folder = library.parent
    env = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "TRITON_LIBCUDA_PATH": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    env |= {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FAKE_NCCL": str(folder),
        "FAKE_GPUS": str(gpus),
    }
    env |= {
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        "OMP_NUM_THREADS": "1",
    }  # cuDNN looks for the GPU by itself
    env["PYTHONFAULTHANDLER"] = "1"  # an abort says in which call
    env["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"  # they need NVML
    env.pop("TRITON_INTERPRET", None)
    env |= {name: str(value) for name, value in settings.items()}
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        if gpus > 1
        else []
    )
    command = [sys.executable, *launcher, script, *map(str, arguments)]
    return subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
