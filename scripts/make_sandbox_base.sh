#!/usr/bin/env bash
# Makes the small world's base again, from nothing, with the pipeline itself, and compares it with the shipped one.
# About an hour on one core. The same bits need the kind of processor, the threads and the versions of the shipped
# manifest; where they differ, the gates of docs/small_world.md decide.
#   scripts/make_sandbox_base.sh          make it and compare
#   scripts/make_sandbox_base.sh --ship   make it and put it in the package
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
shipped=src/pipeline/data/sandbox_base

text=$($python -m pipeline stage=data expert=sandbox expert.world.documents=180000)
last=$($python -m pipeline stage=data expert=sandbox expert.world.last_documents=32000)
train="stage=cpt data.shuffle=false threads=1"
first=$($python -m pipeline $train expert=sandbox_text model=sandbox_random recipe=sandbox_base data_root="$text")
base=$($python -m pipeline $train expert=sandbox_text_last model=trained model.path="$first" recipe=sandbox_base_last data_root="$last")
if [ "${1:-}" = --ship ]; then
  mkdir -p $shipped
  cp "$base"/{config.json,generation_config.json,model.safetensors,tokenizer.json,tokenizer_config.json,log.jsonl,manifest.json} $shipped/
  cp "$last"/{data_card.md,world.json} $shipped/
  echo "shipped $base"
elif cmp -s "$base/model.safetensors" $shipped/model.safetensors; then
  echo "the same bits as the shipped base"
else
  echo "other bits than the shipped base, as on another kind of processor or with other versions: its gates are"
  $python scripts/small_world_gates.py --base "$base" --only-base --record ''
fi
