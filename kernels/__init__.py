"""From decoded planes to the loss: every op runs Triton on CUDA and its `*_ref` in plain PyTorch elsewhere."""
