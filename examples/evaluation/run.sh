#!/usr/bin/env bash
# Evaluate while a tiny model learns to reverse five digits, on a CPU: bash examples/evaluation/run.sh [FOLDER [FLAG ...]]
# Started again with the same folder, it continues the run that is there.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$root/runs/evaluation}
export PATH="$root/.venv/bin:$PATH"
command -v vime > /dev/null || { echo "error: vime is not installed. Run first: make -C $root setup" >&2; exit 1; }
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # for --custom-rm-path

[ -e "$folder/example" ] || python "$root/examples/reverse/prepare.py" --output "$folder/example" --seed 0

# The last 64 prompts are held out. Sampled eight times each they give pass@1 to pass@8, greedily one answer.
cat > "$folder/evaluation.yaml" <<YAML
eval:
  datasets:
    - name: sampled
      path: "$folder/example/prompts.jsonl@[-64:]"
      n_samples_per_eval_prompt: 8
    - name: greedy
      path: "$folder/example/prompts.jsonl@[-64:]"
      temperature: 0
YAML

MODEL=(
    --hf-checkpoint "$folder/example/model"
    --save "$folder/run"
    --save-interval 10
)
if [ -e "$folder/run" ]; then MODEL+=(--load "$folder/run"); fi

CLUSTER=(
    --actor-num-gpus-per-node 1 # without CUDA, one "GPU" is one process
    --rollout-num-gpus 1
)

ROLLOUT=(
    --prompt-data "$folder/example/prompts.jsonl@[:-64]"
    --input-key prompt
    --label-key label
    --custom-rm-path examples.reverse.reward.exact_match
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --num-rollout 40
    --rollout-max-response-len 6 # five digits and the end of the turn
    --rollout-temperature 1.0
    --rollout-data-transport straw
)

EVALUATION=(
    --eval-config "$folder/evaluation.yaml"
    --eval-interval 10
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

exec vime train "${MODEL[@]}" "${CLUSTER[@]}" "${ROLLOUT[@]}" "${EVALUATION[@]}" "${OBJECTIVE[@]}" "${TRAINER[@]}" \
    "${WEIGHTS[@]}" "${@:2}"
