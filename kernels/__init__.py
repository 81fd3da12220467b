"""From decoded planes to the loss: ops that run Triton on CUDA, and plain PyTorch elsewhere.

Each has a file of its name: the function that is called, its reference `*_ref` in PyTorch, the
kernel, the custom op that launches it, and its backward pass.
"""
