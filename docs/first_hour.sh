#!/usr/bin/env bash
# The first hour: own videos, in a folder for each class -> shards -> pre-training -> figures -> fine-tuning -> Hugging
# Face, and from its weights on, with larger frames.
#
#   bash docs/first_hour.sh VIDEOS [OUT]
#
# Without a GPU a small model is the one to try; the numbers may be given: STEPS=300 SIZE=tiny IMAGE=64 FRAMES=8.
set -euo pipefail
cd "$(dirname "$0")/.."
VIDEOS=$1 OUT=${2:-first_hour} PYTHON=${PYTHON:-python}
STEPS=${STEPS:-300} SIZE=${SIZE:-tiny} IMAGE=${IMAGE:-64} FRAMES=${FRAMES:-8} BATCH=${BATCH:-16}
model=(model.size="$SIZE" model.image_size="$IMAGE" model.num_frames="$FRAMES" model.patch_size=8)

# 1. Shards, and what they are good for.
"$PYTHON" shard_tools/make_shards.py "$VIDEOS" "$OUT/shards" --frame-stride 2 --contact-sheet
"$PYTHON" doctor.py "$OUT/shards" data.frame_stride=2 "${model[@]}"

# 2. Pre-training; OUT/pretrain/report.html says how it goes.
"$PYTHON" train.py "${model[@]}" model.mask_ratio=0.85 data.shards="$OUT/shards" evaluation.shards="$OUT/shards" \
  data.frame_stride=2 steps="$STEPS" global_batch="$BATCH" batch_size="$BATCH" optimizer.base_lr=1.6e-2 \
  optimizer.warmup_epochs=1 evaluation.every="$STEPS" run="$OUT/pretrain"
"$PYTHON" -m training.compare "$OUT/pretrain"
"$PYTHON" visualize.py "$OUT/pretrain" "$OUT/shards" --clips 2 --output "$OUT/figures"

# 3. Fine-tuning from it, and how good that is.
"$PYTHON" train.py task=finetune "${model[@]}" data.shards="$OUT/shards" data.frame_stride=2 steps="$STEPS" \
  global_batch="$BATCH" batch_size="$BATCH" optimizer.base_lr=1.6e-2 optimizer.warmup_epochs=1 \
  finetune.checkpoint="$OUT/pretrain" evaluation.shards="$OUT/shards" run="$OUT/finetune"
"$PYTHON" evaluate.py "$OUT/finetune" "$OUT/shards" --clips 2

# 4. Features of every video, and the same model in plain Hugging Face code.
"$PYTHON" -m model.features "$OUT/shards" "$OUT/features" --model "$OUT/pretrain"
"$PYTHON" export.py export "$OUT/pretrain" "$OUT/huggingface" --to huggingface
"$PYTHON" - "$OUT/huggingface" <<'CODE'
import sys

import torch
from transformers import VideoMAEModel

model = VideoMAEModel.from_pretrained(sys.argv[1]).eval()
size = model.config.image_size
clip = torch.zeros(1, model.config.num_frames, 3, size, size)
print("features of a clip in Hugging Face's model:", tuple(model(clip).last_hidden_state.shape))
CODE

# 5. The same from weights in Hugging Face's format, on clips of another size: pre-training goes on, and ends in features.
"$PYTHON" train.py "${model[@]}" model.init="$OUT/huggingface" model.image_size=$((IMAGE + 16)) model.mask_ratio=0.85 \
  data.shards="$OUT/shards" evaluation.shards="$OUT/shards" data.frame_stride=2 steps="$STEPS" \
  global_batch="$BATCH" batch_size="$BATCH" optimizer.base_lr=1.6e-2 optimizer.warmup_epochs=1 \
  evaluation.every="$STEPS" run="$OUT/larger"
"$PYTHON" -m model.features "$OUT/shards" "$OUT/larger_features" --model "$OUT/larger"
