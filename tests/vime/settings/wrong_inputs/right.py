"""Command lines near the wrong ones that a rule must let through."""

from __future__ import annotations

import json

from tests.vime.settings.wrong_inputs.case import LATENT_CONFIG, Case

_HOOKS = {
    "right_hooks.py": (
        "import functools\n"
        "async def reward(args, sample, **more): ...\n"
        "class Reward:\n    async def __call__(self, args, sample): ...\n"
        "by_object = Reward()\n"
        "def in_process(args, sample): ...\n"
        "bound = functools.partial(reward, strict=True)\n"
        "async def generate(args, sample, sampling_params, evaluation=False): ...\n"
        "def on_sample(args, sample, *, rollout_id=None, evaluation=False): ...\n"
        "async def on_sample_async(args, sample, *, rollout_id=None, evaluation=False): ...\n"
        "def weigh(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **more): ...\n"
        "class Source:\n    def __init__(self, args): ...\n    def get_samples(self, n): ...\n"
        "    def add_samples(self, groups): ...\n    def save(self, i): ...\n    def load(self, i=None): ...\n"
        "    def __len__(self): ...\n"
    )
}
_MOUNT = {
    "direct_mount": True,
    "writeback": False,
    "open_cache": 0,
    "readdir_cache": False,
    "client_version": "1.3.0",
    "durability_description": "Redis with AOF, S3",
}
_DISK = "--update-weight-transport disk --update-weight-disk-dir /shared"
_MOE = {"num_experts": 8}
_R3 = "--use-rollout-routing-replay"
_SC = "--use-score-centering"
_TIS = "vime.backends.megatron_utils.loss"


def _right(words: str, files: dict[str, str] | None = None, **more: object) -> Case:
    return Case(words, "", "", "", files=files or {}, **more)  # type: ignore[arg-type]


CASES = (
    # Placement and engines
    _right("--rollout-num-gpus 16 --rollout-num-gpus-per-engine 16"),
    _right("--rollout-num-gpus 12 --rollout-num-gpus-per-engine 4"),
    _right("--rollout-num-gpus 6 --rollout-num-gpus-per-engine 6"),
    _right("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2 --vllm-config $DIR/g.yaml",
           {"g.yaml": "vllm: [{name: a, server_groups: [{worker_type: regular, num_gpus: 3, num_gpus_per_engine: 1}]}]"
            }),
    _right("--colocate --offload --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 2"),
    _right("--colocate --rollout-num-gpus 4 --actor-num-gpus-per-node 2"),
    _right("--offload-train --no-offload-rollout"),
    _right("--offload-train --offload-rollout --flush-cache-interval 1"),
    _right("--no-offload-rollout --flush-cache-interval 4"),
    _right("--advantage-estimator ppo --offload-train --num-critic-only-steps 1"),
    _right("--update-weights-interval 2"),
    _right(f"--release-train --save-interval 1 {_DISK} --no-offload-train"),
    _right(f"--release-train {_DISK} --no-offload-rollout"),
    _right(f"--release-train --colocate {_DISK}"),
    _right(f"--release-train --advantage-estimator ppo {_DISK}"),
    _right("", config=LATENT_CONFIG),
    _right("--mtp-num-layers 1", config={**LATENT_CONFIG, "num_nextn_predict_layers": 1}),
    _right("--mtp-num-layers 1 --pipeline-model-parallel-layout E(t|)*3,tm*1L",
           config={**LATENT_CONFIG, "num_nextn_predict_layers": 1}),
    _right("--pipeline-model-parallel-layout Ett|tL"),
    _right("", config={**LATENT_CONFIG, "kv_lora_rank": 24}, vllm="0.26.0"),
    _right("--save-interval 5"),
    _right("--rollout-external-engine-addrs node3:8000 --flush-cache-interval 4 --no-save-optim"),
    _right("--flush-cache-interval 4", vllm="0.26.0"),
    _right("--rollout-external-engine-addrs node3:8000", vllm="0.26.0"),
    _right("--prefill-num-servers 1 --rollout-num-gpus 2"),
    _right("--rollout-num-gpus 8 --rollout-num-gpus-per-engine 8 --vllm-data-parallel-size 2 "
           "--vllm-pipeline-parallel-size=2"),
    _right("--vllm-max-model-len 512 --rollout-max-prompt-len 504"),
    _right("--vllm-max-model-len 512 --rollout-max-prompt-len 511 --rollout-max-context-len 512 "
           "--rollout-max-response-len 99"),
    _right("--vllm-max-model-len 8000 --rollout-max-response-len 5000"),
    _right("--vllm-router-port 80"),
    _right("--vllm-router-ip 10.0.0.1 --vllm-router-port 80"),
    _right("--router-policy consistent_hash --router-balance-abs-threshold 0"),
    _right("--rollout-top-p 0.9 --rollout-top-k 20"),
    _right("--rollout-top-p 0.9", vllm="0.26.0"),
    _right(_R3, config=_MOE),
    _right("--vllm-no-enable-prefix-caching"),
    _right(f"{_R3} --vllm-no-enable-prefix-caching", vllm="0.26.0", config=_MOE),
    _right(f"{_R3} --vllm-prefill-context-parallel-size 2 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2",
           vllm="0.26.0", config=_MOE),
    _right(f"{_R3} --vllm-data-parallel-size 2 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2", config=_MOE),
    _right(_R3 + ' --vllm-kv-transfer-config {"kv_connector":"OffloadingConnector"}', config=_MOE),
    _right(f"{_R3} --prefill-num-servers 1 --rollout-num-gpus 2", vllm="0.26.0", config=_MOE),
    _right("--prefill-num-servers 1 --rollout-num-gpus 2 --vllm-pipeline-parallel-size 1"),
    # Batches and data
    _right("--global-batch-size 4 --num-steps-per-rollout 2"),
    _right("--num-steps-per-rollout 8"),
    _right("--over-sampling-batch-size 4"),
    _right("--over-sampling-batch-size 6 --rollout-queue-max-groups 4"),
    _right("--actor-num-gpus-per-node 8"),
    _right("--actor-num-gpus-per-node 3 --use-dynamic-batch-size --max-tokens-per-gpu 64"),
    _right("--actor-num-gpus-per-node 12 --tensor-model-parallel-size 2 --use-dynamic-batch-size "
           "--max-tokens-per-gpu 64"),
    _right("--use-dynamic-batch-size --max-tokens-per-gpu 16 --rollout-max-prompt-len 8 --balance-by-flops"),
    _right("--use-dynamic-batch-size --max-tokens-per-gpu 16 --rollout-max-prompt-len 20 --context-parallel-size 2 "
           "--actor-num-gpus-per-node 2"),
    _right("--max-tokens-per-gpu 2"),
    _right("--micro-batch-size 4"),
    _right("--vllm-server-concurrency 1 --rollout-num-gpus 2"),
    _right("--vllm-server-concurrency 4 --rollout-num-producers 2"),
    _right("--num-epoch 2", leave_out="--num-rollout"),
    _right("--data-source-path right_hooks.Source", _HOOKS, leave_out="--prompt-data"),
    _right("--data-source-path right_hooks.Source --prompt-data s3://bucket/data.csv", _HOOKS),
    _right("--prompt-data s3://bucket/data.parquet@[0:10]"),
    _right("--prompt-data $DIR/prompts.jsonl@[-10:]"),
    _right("--rollout-max-context-len 64 --rollout-max-prompt-len 63"),
    _right("--buffer-filter-path vime.filters.newest --rollout-data-transport object-store"),
    _right('--apply-chat-template --apply-chat-template-kwargs {"enable_thinking":false}'),
    _right("--rm-type boxed_math"),
    _right("--rm-type remote_rm --rm-url http://judge:1"),
    _right("--rm-type mine --custom-rm-path right_hooks.reward", _HOOKS),
    _right("--custom-rm-path right_hooks.in_process", _HOOKS),
    _right("--rm-type dapo --reward-key acc"),
    _right("--prompt-data reasoning_gym:chain_sum?seed=1"),
    _right("--rm-type remote_rm --custom-rm-path right_hooks.reward", _HOOKS),
    _right("--partial-rollout --mask-offpolicy-in-partial-rollout"),
    _right("--rollout-all-samples-process-path vime.hooks.all"),
    _right("--rollout-all-samples-process-path vime.hooks.all --flush-cache-interval 4 "
           "--rollout-data-transport object-store"),
    # Objective
    _right("--advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.1 --ref-load $DIR/model"),
    _right("--advantage-estimator gspo --pg-loss-type ppo --eps-clip-c 3"),
    _right("--advantage-estimator cispo --eps-clip 1"),
    _right("--loss-type custom_loss --custom-loss-function-path vime.a --disable-compute-advantages-and-returns"),
    _right("--loss-type sft_loss --disable-compute-advantages-and-returns", leave_out="--rm-type"),
    _right("--loss-type sft_loss --loss-mask-type qwen3 --rollout-num-gpus 0",
           leave_out="--rm-type --rollout-max-response-len"),
    _right("--loss-type custom_loss --custom-loss-function-path vime.a --use-rollout-entropy --normalize-advantages"),
    _right("--use-opd --opd-type vllm --rm-url http://teacher:1 --rollout-top-p 0.9", leave_out="--rm-type"),
    _right("--use-opd --opd-type megatron --opd-teacher-load $DIR/model --rollout-temperature 0.7"),
    _right("--use-dynamic-batch-size --max-tokens-per-gpu 64 --log-probs-max-tokens-per-gpu 64"),
    _right("--use-tis --tis-clip-low 2"),
    _right("--use-rollout-logprobs"),
    _right("--use-tis --use-rollout-logprobs --pg-loss-type reinforce"),
    _right(f"--get-mismatch-metrics --custom-tis-function-path {_TIS}.icepop_function"),
    _right("--use-tis --custom-tis-function-path right_hooks.weigh", _HOOKS),
    _right("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3 --use-unbiased-kl --ref-load $DIR/model "
           "--ref-update-interval 2 --ref-ckpt-step 4"),
    _right("--kl-coef 0.1 --kl-loss-type k2 --advantage-estimator ppo --ref-load $DIR/model"),
    _right("--kl-coef 0.1 --custom-advantage-function-path vime.a.b --ref-load $DIR/model"),
    _right(f"{_SC} --pg-loss-type reinforce --use-tis --custom-tis-function-path {_TIS}.icepop_function"),
    _right(f"{_SC} --rollout-top-p 0.9 --vllm-max-logprobs 20"),
    _right(f"{_SC} --vllm-max-logprobs 129 --use-tis --use-rollout-logprobs"),
    _right("--vllm-max-logprobs 20"),
    _right(_SC, environment={"VLLM_RETURN_ORIGINAL_LOGPROB": "1"}),
    _right(f"{_SC} --rollout-temperature 0.7", environment={"VLLM_RETURN_ORIGINAL_LOGPROB": "0"}),
    _right("--rollout-temperature 0.7", environment={"VLLM_RETURN_ORIGINAL_LOGPROB": "1"}),
    _right(f"{_SC} --score-centering-top-k 512"),
    _right("--score-centering-top-k 600"),
    _right("--use-opsm --use-opd --opd-type megatron --opd-teacher-load $DIR/model --opd-teacher-ckpt-step 1"),
    _right("--use-opd --opd-type vllm --rm-url http://teacher:1"),
    _right("--use-opd --opd-type vllm --opd-teacher-model b --vllm-config $DIR/g.yaml",
           {"g.yaml": "vllm:\n- name: a\n  server_groups: [{worker_type: regular, num_gpus: 1}]\n- name: b\n  "
                      "model_path: /b\n  update_weights: false\n  server_groups: [{worker_type: regular, num_gpus: 4, "
                      "num_gpus_per_engine: 2, overrides: {dtype: float32}}]\n"}),
    # Weights and storage
    _right("--flush-cache-interval 0"),
    _right("--debug-rollout-only"),
    _right(f"{_DISK} --update-weight-disk-keep-files --update-weight-local-checkpoint-dir /local"),
    _right(f"{_DISK} --update-weight-mode delta --update-weight-local-checkpoint-dir /local "
           "--update-weight-delta-encoding overwrite --update-weight-delta-checksum blake3"),
    _right("--rollout-queue-online-gc --rollout-queue-segment-mib 64"),
    _right("--rollout-data-transport nixl"),
    _right("--rollout-storage-profile juicefs --rollout-storage-declaration $DIR/m.json",
           {"m.json": json.dumps(_MOUNT)}),
    _right("--rollout-queue-run-id run-2.b"),
    # Checkpoints, evaluation, debug modes
    _right("--load $DIR/not-yet --ckpt-step 4"),
    _right("--ckpt-step 4"),
    _right("--start-rollout-id 2"),
    _right("--num-rollout 0 --start-rollout-id 2 --eval-prompt-data $DIR/prompts.jsonl"),
    _right("--no-save-optim --use-stateless-adam --optimizer adam"),
    _right("--no-save-optim --rollout-data-transport object-store --no-save-rng --ckpt-format torch"),
    _right("--no-save-optim --no-save-rng --debug-rollout-only"),
    _right("--ckpt-format torch_dist"),
    _right("--only-train-params-name-list lora_.* .*bias$"),
    _right("--eval-interval 2 --eval-prompt-data $DIR/prompts.jsonl --skip-eval-before-train"),
    _right("--eval-interval 2 --eval-prompt-data a $DIR/prompts.jsonl b hf://data/b.jsonl"),
    _right("--num-rollout 0 --eval-prompt-data a $DIR/prompts.jsonl"),
    _right("--group-rm"),
    _right("--eval-interval 2 --eval-config $DIR/e.yaml --eval-min-new-tokens 9 --eval-max-response-len 9",
           {"e.yaml": "eval:\n  defaults: {temperature: 0.6}\n"
                      "  datasets: [{name: a, path: prompts.jsonl, top_p: 0.9}]\n"}),
    _right("--eval-max-prompt-len 63 --eval-max-context-len 64"),
    _right("--debug-train-only --load-debug-rollout-data out/{rollout_id}.pt --load-debug-rollout-data-subsample 0.5",
           leave_out="--prompt-data"),
    _right("--dump-details d"),
    _right("--save-debug-rollout-data a/{rollout_id}.pt --save-debug-train-data b/{rollout_id}_{rank}.pt"),
    _right("--save-hf out/{rollout_id:06d}"),
    _right("--megatron-config-path $DIR/r.yaml --advantage-estimator ppo",
           {"r.yaml": "megatron:\n- {name: default, role: actor, overrides: {lr: 1.0e-6}}\n"
                      "- {name: default, role: critic, args: {lr_warmup_iters: 3}}\n"}),
    # Megatron
    _right("--tensor-model-parallel-size 2 --pipeline-model-parallel-size=2 --actor-num-gpus-per-node 4 --bf16"),
    _right("--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 4 "
           "--actor-num-gpus-per-node 4", config=_MOE),
    _right("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 10 --actor-num-gpus-per-node 3 "
           "--rollout-batch-size 6"),
    _right("--tensor-model-parallel-size 16 --actor-num-gpus-per-node 16", config={"num_key_value_heads": 8}),
    _right("--num-layers 28 --norm-epsilon 1e-6 --rotary-base 1000000",
           config={"rms_norm_eps": 1e-06, "rope_theta": 1000000}),
    _right("--padded-vocab-size 512"),
    # Hooks
    _right("--custom-rm-path right_hooks.by_object --custom-generate-function-path right_hooks.generate "
           "--rollout-sample-hook-path right_hooks.on_sample --rollout-sample-hook-path right_hooks.on_sample_async",
           _HOOKS),
    _right("--custom-rm-path right_hooks.bound", _HOOKS),
    # Half a pair
    _right("--custom-rm-path right_hooks.reward", _HOOKS, leave_out="--rm-type"),
    _right("--debug-train-only --load-debug-rollout-data {rollout_id}.pt", leave_out="--rm-type --prompt-data"),
    _right("--no-offload-rollout"),
    _right("--colocate --no-offload-rollout"),
    _right("--rollout-max-context-len 64"),
    _right("--eval-max-prompt-len 64"),
    _right("--eval-max-context-len 64"),
    _right("--fp16"),
    _right("--vllm-max-model-len auto"),
    _right("--load-forge-rollout-data $DIR/prompts.jsonl"),
    _right("--use-opd --opd-type megatron --opd-teacher-load $DIR/model"),
    _right("--rollout-max-response-len 4096"),
    _right(_SC, config={"vocab_size": None}),
    _right("--padded-vocab-size 5", config={"vocab_size": None}),
    _right("--tensor-model-parallel-size 8 --actor-num-gpus-per-node 8 --vllm-max-logprobs 1_0"),
    _right(f"{_SC} --vllm-max-logprobs -1"),
    _right("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 3"),
    _right("--use-routing-replay", config={"num_local_experts": 8}),
    _right("--flush-cache-interval 4 --rollout-external-engine-addrs node3:8000 --rollout-num-gpus 0"),
)  # fmt: skip
