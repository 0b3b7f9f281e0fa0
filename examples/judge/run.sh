#!/usr/bin/env bash
# Train a tiny model by a judge behind HTTP, on a CPU: bash examples/judge/run.sh [FOLDER [FLAG ...]]
# Started again with the same folder, it continues the run that is there.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$root/runs/judge}
export PATH="$root/.venv/bin:$PATH"
command -v vime > /dev/null || { echo "error: vime is not installed. Run first: make -C $root setup" >&2; exit 1; }
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

mkdir -p "$folder"
[ -e "$folder/example" ] || python "$root/examples/reverse/prepare.py" --output "$folder/example" --seed 0

rm -f "$folder/judge_address"
python "$root/examples/judge/server.py" --address-file "$folder/judge_address" &
judge=$!
trap 'kill $judge 2>/dev/null || true' EXIT
for _ in $(seq 300); do [ -e "$folder/judge_address" ] && break; sleep 0.1; done
[ -e "$folder/judge_address" ] || { echo "error: the judge did not start" >&2; exit 1; }

MODEL=(
    --hf-checkpoint "$folder/example/model"
    --save "$folder/run"
    --save-interval 20
)
if [ -e "$folder/run" ]; then MODEL+=(--load "$folder/run"); fi

CLUSTER=(
    --actor-num-gpus-per-node 1 # without CUDA, one "GPU" is one process
    --rollout-num-gpus 1
)

ROLLOUT=(
    --prompt-data "$folder/example/prompts.jsonl"
    --input-key prompt
    --label-key label
    --rm-type remote_rm
    --rm-url "$(cat "$folder/judge_address")"
    --reward-concurrency 32 # requests at the judge at once
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --num-rollout 40
    --rollout-max-response-len 6
    --rollout-temperature 1.0
    --rollout-data-transport straw
)

OBJECTIVE=(
    --advantage-estimator grpo
    --use-rollout-logprobs
    --calculate-per-token-loss
)

TRAINER=(
    --lr 4e-4
    --clip-grad 1.0
    --use-dynamic-batch-size
    --max-tokens-per-gpu 4096
)

WEIGHTS=(
    --flush-cache-interval 0 # running requests keep their KV cache through an update
)

vime train "${MODEL[@]}" "${CLUSTER[@]}" "${ROLLOUT[@]}" "${OBJECTIVE[@]}" "${TRAINER[@]}" "${WEIGHTS[@]}" "${@:2}"
