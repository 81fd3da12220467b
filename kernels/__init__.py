"""From decoded planes to the loss: ops that run Triton on CUDA, and plain PyTorch elsewhere.

Each op has a file of its name: the function that is called, its reference `*_ref` in PyTorch, the
kernel, the custom op that launches it and, if it is differentiated, its backward pass. Three files
hold what they share: noise.py random numbers, launch.py checks and launches, clip_tables.py the
layout of decoded clips.
"""
