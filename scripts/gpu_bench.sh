#!/usr/bin/env bash
# What scoring and training cost on the GPU of this machine, at the shape of an 8B Llama with random weights, and the
# tests that need one: about nine minutes. Records go to the folder given, or results/bench.
#   scripts/gpu_bench.sh [FOLDER] [PART ...]    # parts: evaluate tests train
set -uo pipefail
cd "$(dirname "$0")/.."
to=${1:-results/bench}
parts=${*:2}
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
card=$($python -c 'import torch; print(torch.cuda.get_device_name().split()[1].lower() if torch.cuda.is_available() else "cpu")')
for part in ${parts:-evaluate tests train}; do
  case $part in
    evaluate) timeout 220 "$python" scripts/gpu_evaluate.py --record "$to/evaluate_$card.json" ;;
    tests) timeout 120 "$python" -m pytest -q -m gpu tests/evaluate/test_on_a_gpu.py tests/merge/test_live.py ;;
    train) timeout 180 "$python" scripts/gpu_train.py --seconds 120 --record "$to/train_$card.json" ;;
  esac
  echo "$part: exit status $?"
done
