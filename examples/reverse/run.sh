#!/usr/bin/env bash
# Train a tiny model to reverse five digits, on a CPU: bash examples/reverse/run.sh [FOLDER [FLAG ...]]
# Started again with the same folder, it continues the run that is there.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$root/runs/reverse}
export PATH="$root/.venv/bin:$PATH"
command -v vime > /dev/null || { echo "error: vime is not installed. Run first: make -C $root setup" >&2; exit 1; }
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # for --custom-rm-path

[ -e "$folder/example" ] || python "$root/examples/reverse/prepare.py" --output "$folder/example" --seed 0

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
    --custom-rm-path examples.reverse.reward.exact_match
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --num-rollout 80
    --rollout-max-response-len 6 # five digits and the end of the turn
    --rollout-temperature 1.0
    --rollout-data-transport straw
)

OBJECTIVE=(
    --advantage-estimator grpo
    --use-rollout-logprobs
    --calculate-per-token-loss
    --eps-clip 0.2
    --eps-clip-high 0.28
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
