#!/usr/bin/env bash
# End-to-end tutorial: your own videos, in one folder per class -> shards -> pre-training -> plots -> fine-tuning ->
# Hugging Face, and continued pre-training from its weights with larger frames.
#
#   bash docs/first_hour.sh VIDEOS [OUT]
#
# The defaults are small enough for a CPU; set variables to change them: STEPS=300 SIZE=tiny IMAGE=64 FRAMES=8. LABELS
# answers make_shards.py if it asks whether the folders are classes: LABELS="--label folder:2".
set -euo pipefail
cd "$(dirname "$0")/.."
VIDEOS=$1 OUT=${2:-first_hour} PYTHON=${PYTHON:-python}
STEPS=${STEPS:-300} SIZE=${SIZE:-tiny} IMAGE=${IMAGE:-64} FRAMES=${FRAMES:-8} BATCH=${BATCH:-16}
model=(model.size="$SIZE" model.image_size="$IMAGE" model.num_frames="$FRAMES" model.patch_size=8)
settings=(data.shards="$OUT/shards/train" evaluation.shards="$OUT/shards/validation" data.frame_stride=2 steps="$STEPS"
  global_batch="$BATCH" batch_size="$BATCH" optimizer.base_lr=1.6e-2
  evaluation.every="$STEPS")

# 1. Build shards, a fifth of the videos apart, and check the environment and the loading speed.
"$PYTHON" shard_tools/make_shards.py "$VIDEOS" "$OUT/shards" --hold-out 0.2 --frame-stride 2 ${LABELS:-}
"$PYTHON" doctor.py "$OUT/shards/train" "${model[@]}" "${settings[@]}" model.mask_ratio=0.85

# 2. Pre-train; OUT/pretrain/report.html tracks progress.
"$PYTHON" train.py "${model[@]}" "${settings[@]}" model.mask_ratio=0.85 run="$OUT/pretrain"
"$PYTHON" visualize.py "$OUT/pretrain" "$OUT/shards/validation" --clips 4 --output "$OUT/figures"

# Compare it with an encoder that is not trained, and with what needs none.
"$PYTHON" compare.py "$OUT/shards" --models "$OUT/pretrain" --output "$OUT/comparison"

# 3. Fine-tune and evaluate.
"$PYTHON" train.py task=finetune "${model[@]}" "${settings[@]}" init_from="$OUT/pretrain" run="$OUT/finetune"
accuracy=$("$PYTHON" evaluate.py "$OUT/finetune" "$OUT/shards/validation" --clips 2)

# 4. Extract features of every video; load the same model in plain Hugging Face code.
"$PYTHON" extract_features.py "$OUT/shards/validation" "$OUT/features" --model "$OUT/pretrain"
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

# 5. Continue pre-training from weights in Hugging Face's format, on larger frames, and extract features.
"$PYTHON" train.py "${model[@]}" "${settings[@]}" init_from="$OUT/huggingface" model.image_size=$((IMAGE + 16)) \
  model.mask_ratio=0.85 run="$OUT/larger"
"$PYTHON" extract_features.py "$OUT/shards/validation" "$OUT/larger_features" --model "$OUT/larger"

# 6. What was found.
"$PYTHON" benchmarks/motion_report.py "$OUT/pretrain" "$OUT/shards/validation" --output "$OUT"
echo "fine-tuned: $accuracy"
echo "pictures: $OUT/figures, report: $OUT/pretrain/report.html, comparison: $OUT/comparison/compare.html"
