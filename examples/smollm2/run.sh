#!/usr/bin/env bash
# Train SmolLM2-135M for a few steps on small sums, on a CPU: bash examples/smollm2/run.sh [FOLDER [FLAG ...]]
# Started again with the same folder, it continues the run that is there.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$root/runs/smollm2}
export PATH="$root/.venv/bin:$PATH"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # for --custom-rm-path

mkdir -p "$folder"
[ -e "$folder/example" ] || python "$root/examples/smollm2/prepare.py" --output "$folder/example"

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

ENGINE=(
    --vllm-dtype bfloat16
    --backend-parity strict # head and residual stream in float32, as the trainer's
    --vllm-max-model-len 128
)

ROLLOUT=(
    --prompt-data "$folder/example/prompts.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --custom-rm-path examples.smollm2.reward.right_sum
    --rollout-batch-size 8
    --n-samples-per-prompt 4
    --num-rollout 10
    --rollout-max-response-len 24
    --rollout-temperature 1.0
    --rollout-data-transport straw
)

OBJECTIVE=(
    --advantage-estimator grpo
    --use-rollout-logprobs
    --calculate-per-token-loss
)

TRAINER=(
    --lr 2e-6
    --clip-grad 1.0
    --use-dynamic-batch-size
    --max-tokens-per-gpu 1024
)

WEIGHTS=(
    --flush-cache-interval 0 # running requests keep their KV cache through an update
)

exec vime train "${MODEL[@]}" "${CLUSTER[@]}" "${ENGINE[@]}" "${ROLLOUT[@]}" "${OBJECTIVE[@]}" "${TRAINER[@]}" \
    "${WEIGHTS[@]}" "${@:2}"
