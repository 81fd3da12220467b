#!/usr/bin/env bash
# The first hour on a GPU: everything that needs one, in stages, the most telling first.
#
#     bash benchmarks/on_gpu.sh OUTPUT [STAGE ...]
#
# A stage takes 8 minutes (STAGE_SECONDS) at most; it is then given up, and the next one goes on, as after a failure.
# OUTPUT gets the results, and <stage>.log with what a stage printed. PYTHON: the interpreter; VIDEOS: a folder, else
# synthetic ones are generated in OUTPUT/scratch, beside shards; SMALL=1: the same commands at sizes that a CPU
# takes, to see that they run. TRIALS: a folder with nvdec_trial.py and jpeg_trial.py, for the stage `trials`, which
# only runs if it is named. With ten minutes, to choose the decoder of a GPU:
#
#     TRIALS=FOLDER VIDEOS=FOLDER bash benchmarks/on_gpu.sh OUTPUT trials decode
set -u
[ $# -gt 0 ] || { echo "error: name the folder for the results: bash benchmarks/on_gpu.sh OUTPUT [STAGE ...]" >&2; exit 1; }
mkdir -p "$1" && out=$(realpath "$1") && shift || exit 1
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
ALL="decode tests end_to_end few_cores step kernels memory resume"
stage_seconds=${STAGE_SECONDS:-480}
videos=${VIDEOS:-$out/scratch/videos}

run() {
  local left=$((deadline - SECONDS))
  echo "$ python $*"
  # 0 would be no limit.
  ${cores:+taskset -c "$cores"} timeout --kill-after=10 $((left > 0 ? left : 1)) "${PYTHON:-python}" "$@"
}

make_videos() {
  [ -e "$videos" ] && return
  if [ -n "${SMALL:-}" ]; then set -- --num-videos 8 --size 64 --num-frames 64
  else set -- --num-videos 96 --size 342x256 --num-frames 240; fi
  run shard_tools/synthetic_videos.py "$videos" "$@"
}

run_trials() {
  [ -n "${TRIALS:-}" ] || { echo "error: name the folder with the trials: TRIALS=FOLDER" && return 1; }
  local clips="$TRIALS/clips.pkl"
  if [ ! -e "$clips" ]; then
    make_videos && run "$TRIALS/nvdec_trial.py" prepare --videos "$videos" --clips-per-video 1 --out "$clips" || return
  fi
  run "$TRIALS/nvdec_trial.py" all --clips "$clips" --out "$out/nvdec.jsonl" --budget "$([ -n "${SMALL:-}" ] && echo 20 || echo 320)"
  local jpegs="$TRIALS/jpegs.pkl"
  if [ ! -e "$jpegs" ]; then
    make_videos && run "$TRIALS/jpeg_trial.py" prepare --videos "$videos" --count 16 --out "$jpegs" || return
  fi
  run "$TRIALS/jpeg_trial.py" all --clips "$jpegs" --out "$out/jpeg.jsonl" --budget "$([ -n "${SMALL:-}" ] && echo 20 || echo 90)"
}

stage() {
  local size=${SMALL:+-small}
  case "$1$size" in
    step) run benchmarks/train_throughput.py --output "$out" ;;
    step-small) run benchmarks/train_throughput.py --output "$out" --size tiny --batch-size 1 --repetitions 1 --rounds 1 ;;
    end_to_end) make_videos && run benchmarks/end_to_end.py "$videos" --work "$out/scratch" --output "$out" \
      --rounds 1 --steps 60 --compile --encodes h264 mjpeg ;;
    end_to_end-small) make_videos && run benchmarks/end_to_end.py "$videos" --work "$out/scratch" --output "$out" \
      --rounds 1 --steps 1 --size tiny --batch-size 2 --encodes h264 ;;
    # Each decoder, where a GPU has four cores.
    few_cores) make_videos &&
      for decoder in pyav dali auto; do
        cores=0-3 run benchmarks/end_to_end.py "$videos" --work "$out/scratch" --output "$out/4_cores_$decoder" \
          --rounds 1 --steps 60 --compile --encodes mjpeg --decoder "$decoder" || return
      done ;;
    few_cores-small) make_videos && cores=0 run benchmarks/end_to_end.py "$videos" --work "$out/scratch" \
      --output "$out/1_core" --rounds 1 --steps 1 --size tiny --batch-size 2 --encodes mjpeg ;;
    decode) make_videos && run benchmarks/pipeline_throughput.py "$videos" --work "$out/scratch" --output "$out" \
      --rounds 1 --seconds 5 --encodes mjpeg h264 --decoders pyav dali ;;  # by JPEG engines, then by NVDEC
    decode-small) make_videos && run benchmarks/pipeline_throughput.py "$videos" --work "$out/scratch" --output "$out" \
      --rounds 1 --seconds 0.5 --encodes h264 --batch-size 4 ;;
    trials | trials-small) run_trials ;;
    memory) run benchmarks/memory_vs_ratio.py --output "$out" ;;
    memory-small) run benchmarks/memory_vs_ratio.py --output "$out" --size tiny --batch-size 2 ;;
    kernels) run benchmarks/kernel_speed.py --output "$out" ;;
    kernels-small) run benchmarks/kernel_speed.py --output "$out" --batch-size 1 --repetitions 1 --op gather_tokens ;;
    resume) run -m pytest -m gpu -p no:cacheprovider tests/training/test_numerics.py ;;
    # If a package is missing that only some tests need, the others run.
    tests) local failed=0
      run -m pytest -m 'not gpu' -p no:cacheprovider tests/kernels --ignore tests/kernels/test_compile.py || failed=1
      run -m pytest -m gpu --continue-on-collection-errors -p no:cacheprovider tests \
        --ignore tests/training/test_numerics.py && [ $failed = 0 ] ;;
    resume-small | tests-small) run -m pytest -m gpu --collect-only -p no:cacheprovider tests ;;
    *) echo "error: there is no stage $1: choose among $ALL" && return 1 ;;
  esac
}

failed=0
for name in ${*:-$ALL}; do
  started=$SECONDS deadline=$((SECONDS + stage_seconds))
  if stage "$name" >"$out/$name.log" 2>&1; then ended=done
  else ended="failed with exit code $? (124: out of time): $(tail -n 1 "$out/$name.log")" failed=1; fi
  echo "$name: $ended, $((SECONDS - started)) s"
done
exit $failed
