#!/usr/bin/env bash
# Train a tiny model to spell backward, on tasks of reasoning-gym, on a CPU: bash examples/gym/run.sh [FOLDER [FLAG ...]]
# Started again with the same folder, it continues the run that is there.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$root/runs/gym}
export PATH="$root/.venv/bin:$PATH"
command -v vime > /dev/null || { echo "error: vime is not installed. Run first: make -C $root setup" >&2; exit 1; }
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

mkdir -p "$folder"
[ -e "$folder/model" ] || python "$root/examples/gym/prepare.py" --output "$folder/model" --seed 0

MODEL=(
    --hf-checkpoint "$folder/model"
    --save "$folder/run"
    --save-interval 20
)
if [ -e "$folder/run" ]; then MODEL+=(--load "$folder/run"); fi

CLUSTER=(
    --actor-num-gpus-per-node 1 # without CUDA, one "GPU" is one process
    --rollout-num-gpus 1
)

ROLLOUT=(
    # 2,000 words of three letters. Question and answer come from the data set, and so does the score.
    --prompt-data "reasoning_gym:spell_backward?seed=1&size=2000&max_word_len=3"
    --rm-type reasoning_gym
    --rollout-shuffle
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --num-rollout 40
    --rollout-max-response-len 4
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
