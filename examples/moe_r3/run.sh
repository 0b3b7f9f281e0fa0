#!/usr/bin/env bash
# Train a tiny mixture of experts with the sampler's routes replayed, on a CPU: bash examples/moe_r3/run.sh [FOLDER [FLAG ...]]
# Started again with the same folder, it continues the run that is there.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$root/runs/moe_r3}
export PATH="$root/.venv/bin:$PATH"
command -v vime > /dev/null || { echo "error: vime is not installed. Run first: make -C $root setup" >&2; exit 1; }
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # for --custom-rm-path

mkdir -p "$folder"
[ -e "$folder/example" ] || python "$root/examples/moe_r3/prepare.py" --output "$folder/example" --seed 0

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
    --vllm-dtype bfloat16 # the trainer computes in float32, so that routers would sometimes choose other experts
)

ROLLOUT=(
    --prompt-data "$folder/example/prompts.jsonl"
    --input-key prompt
    --label-key label
    --custom-rm-path examples.moe_r3.reward.digit_share
    --rollout-batch-size 16
    --n-samples-per-prompt 8
    --num-rollout 20
    --rollout-max-response-len 8
    --rollout-temperature 1.0
    --rollout-data-transport straw
)

OBJECTIVE=(
    --advantage-estimator grpo
    --use-rollout-logprobs
    --use-rollout-routing-replay # the experts that served a token when it was sampled serve it in training, too (R3)
    --calculate-per-token-loss
)

TRAINER=(
    --lr 1e-3
    --clip-grad 1.0
    --use-dynamic-batch-size
    --max-tokens-per-gpu 4096
)

WEIGHTS=(
    --flush-cache-interval 0 # running requests keep their KV cache through an update
)

exec vime train "${MODEL[@]}" "${CLUSTER[@]}" "${ENGINE[@]}" "${ROLLOUT[@]}" "${OBJECTIVE[@]}" "${TRAINER[@]}" \
    "${WEIGHTS[@]}" "${@:2}"
