"""Compare predicted bytes with those of an actual step, and workspaces with measured ones."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_random_teacher

from adamae.benchmarks.harness import ROOT
from adamae.benchmarks.step import measure_config
from adamae.model.config import ModelConfig
from adamae.training.accounting import (
    CUBLAS_BYTES,
    CUBLAS_THREADS,
    LiveBytes,
    account,
    attention_workspace,
    column_sum_workspace,
    predict,
)
from adamae.training.config import parse
from adamae.training.numerics import numerics
from adamae.training.timing import PretrainingStep, noise_clip

CPU = torch.device("cpu")
TINY = ModelConfig(
    "tiny", num_frames=4, image_size=64, mask_ratio=0.75, encoder_depth=1, decoder_depth=1
)


@pytest.mark.parametrize("target", ["pixels", "teacher"])
def test_the_bytes_predicted_without_memory_are_those_of_an_actual_step(
    target: str, tmp_path: Path
) -> None:
    config = TINY
    if target == "teacher":
        config = replace(TINY, target="teacher", teacher=write_random_teacher(TINY, tmp_path))
    live = LiveBytes("weights")
    with live:
        step = PretrainingStep.of(config, CPU)
        live.label = "clip"
        actual = account(step, noise_clip(config, 2, CPU), live)
    predicted = predict(config, 2, on_gpu=False)
    for label in ("weights", "optimizer", "clip", "weight_copies"):
        assert predicted[label] == actual[label]
    weights = sum(p.numel() * 4 for p in step.model.parameters())
    assert actual["optimizer"] == pytest.approx(2 * weights, rel=0.1)


def test_the_workspaces_of_a_gpus_libraries_are_counted() -> None:
    """Those of flash attention are calculated by hand.

    70 rows of 40 values are padded to 128 rows of 64, in fp32, beside a sum for each row.
    """
    q = torch.empty(2, 3, 70, 40, device="meta")
    padded_rows = 2 * 3 * 128
    assert attention_workspace(q) == 4 * padded_rows * (1 + 64)
    # A gradient for each of 22 groups of 6 heads that keep 132 multiprocessors busy.
    with numerics(parse(["data.shards=s", "deterministic=true"])):
        assert attention_workspace(q) == 4 * padded_rows * (1 + 22 * 64)
    on_gpu = LiveBytes("now", on_gpu=True)
    on_cpu = LiveBytes("now", on_gpu=False)
    q, k, v = (torch.randn(1, 2, 300, 32, requires_grad=True) for _ in range(3))
    for live in (on_gpu, on_cpu):
        with live:
            torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
    assert on_gpu.at_peak["cublas"] == CUBLAS_THREADS * CUBLAS_BYTES
    assert on_gpu.at_peak["temporaries"] == attention_workspace(q)
    with on_gpu:
        bias = torch.zeros(512, requires_grad=True)
        torch.nn.functional.linear(torch.ones(40, 512), torch.ones(512, 512), bias).sum().backward()
    assert on_gpu.at_peak["cublas"] == (CUBLAS_THREADS or 1) * CUBLAS_BYTES
    assert not on_cpu.at_peak["cublas"]
    assert not on_cpu.at_peak["temporaries"]


def test_the_workspace_of_a_column_sum_is_what_pytorchs_allocator_gave_it() -> None:
    # In MiB, by torch 2.11 and 2.15 on the stand-in for CUDA.
    measured = {
        (23840, 1536): 132,
        (23840, 384): 70,
        (1248, 768): 7.5,
        (1248, 3072): 30,
        (25088, 768): 132,
    }
    predicted = {shape: column_sum_workspace(*shape) / 2**20 for shape in measured}
    assert predicted == pytest.approx(measured, rel=1e-3)
    assert column_sum_workspace(64, 768) == 0, "a block sums a column"


def test_gradients_in_buckets_are_there_all_the_time() -> None:
    plain = predict(TINY, 4, in_buckets=False)
    in_buckets = predict(TINY, 4, in_buckets=True)
    assert in_buckets["gradients"] == pytest.approx(plain["weights"], rel=0.2)
    grown = sum(in_buckets.values()) - sum(plain.values())
    assert 0 < grown <= 1.2 * plain["weights"]


# GiB and FLOPs of 16 clips on a GPU; the paper's memory is 14.4 GB, and 21.3 with 8 decoder blocks.
@pytest.mark.parametrize(
    ("changes", "gib", "flops"),
    [
        ({}, 3.406, 4.180e12),
        pytest.param({"decoder_depth": 8}, 4.363, 6.091e12, marks=pytest.mark.slow),
        pytest.param({"activation_checkpointing": True}, 2.258, 5.103e12, marks=pytest.mark.slow),
    ],
)
def test_the_predicted_step_of_vit_base(changes: dict[str, Any], gib: float, flops: float) -> None:
    program = f"""
from adamae.training.accounting import count_flops, predict
from adamae.model.config import ModelConfig
config = ModelConfig(**{changes})
print(sum(predict(config, 16).values()) / 2**30, count_flops(config, 16))
"""
    # In Triton's interpreter, kernels would need real memory: the process must be one without it.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, check=True
    )
    predicted = [float(word) for word in done.stdout.split()]
    # Before torch 2.15, two workspaces last from step to step.
    cublas = CUBLAS_THREADS * CUBLAS_BYTES / 2**30
    assert predicted == pytest.approx([gib + cublas, flops], rel=0.005)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"masking": "tube"}, {"activation_checkpointing": True}])
def test_predicted_memory_is_what_a_gpu_needs(changes: dict[str, Any]) -> None:
    config = ModelConfig(size="small", **changes)
    measured = measure_config(config, 16, 2, torch.device("cuda"))["peak_memory_gib"]
    predicted = sum(predict(config, 16).values()) / 2**30
    assert predicted == pytest.approx(measured, rel=0.02)
