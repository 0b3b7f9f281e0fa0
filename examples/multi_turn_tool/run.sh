#!/usr/bin/env bash
# Train a tiny model to ask a calculator, on a CPU: bash examples/multi_turn_tool/run.sh [FOLDER [FLAG ...]]
# Started again with the same folder, it continues the run that is there.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$root/runs/multi_turn_tool}
export PATH="$root/.venv/bin:$PATH"
command -v vime > /dev/null || { echo "error: vime is not installed. Run first: make -C $root setup" >&2; exit 1; }
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # for the example's own functions

mkdir -p "$folder"
[ -e "$folder/example" ] || python "$root/examples/multi_turn_tool/prepare.py" --output "$folder/example" --seed 0

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
    --apply-chat-template
    --custom-generate-function-path examples.multi_turn_tool.converse.converse
    --custom-rm-path examples.multi_turn_tool.reward.right_product
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --num-rollout 60
    --rollout-max-response-len 32 # two calls, their answers, and four digits
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

exec vime train "${MODEL[@]}" "${CLUSTER[@]}" "${ROLLOUT[@]}" "${OBJECTIVE[@]}" "${TRAINER[@]}" "${WEIGHTS[@]}" "${@:2}"
