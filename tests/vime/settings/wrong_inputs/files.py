"""Files that flags name: whether they are there, and what is in them."""

import json

from tests.vime.settings.wrong_inputs.case import LATENT_CONFIG, Case

_DECLARED = {
    "direct_mount": True,
    "writeback": False,
    "open_cache": 0,
    "readdir_cache": False,
    "client_version": "1.3.0",
    "durability_description": "Redis with AOF, S3",
}
_MOUNT = "--rollout-storage-profile juicefs --rollout-storage-declaration $DIR/mount.json"
_KNOWN = "checkpoint_is_a_known_model"
_LAYOUT = "--pipeline-model-parallel-layout"
_PLACES = "a_layout_places_layers_for_further_tokens"
_EVAL = "--eval-interval 1 --eval-config $DIR/eval.yaml"
_ROLES = "--megatron-config-path $DIR/roles.yaml"
_GROUPS = "--vllm-config $DIR/groups.yaml"
_ONE_GROUP = "server_groups: [{worker_type: regular, num_gpus: 2}]"


def _mount(found: str, allowed: str, **changed: object) -> Case:
    content = {key: value for key, value in {**_DECLARED, **changed}.items() if value is not None}
    return Case(_MOUNT, found, allowed, "declare it.", "declared_mount_is_safe", {"mount.json": json.dumps(content)})


def _evaluation(content: str, found: str, allowed: str, next_step: str) -> Case:
    return Case(_EVAL, found, allowed, next_step, "evaluation_file_names_data_sets", {"eval.yaml": content})


def _roles(content: str, found: str, allowed: str, next_step: str, rule: str = "roles_can_be_overridden") -> Case:
    return Case(_ROLES, found, allowed, next_step, rule, {"roles.yaml": content})


def _groups(content: str, found: str, allowed: str, next_step: str) -> Case:
    return Case(_GROUPS, found, allowed, next_step, "server_groups_are_whole", {"groups.yaml": content})


CASES = (
    Case("--save $DIR/file", "--save $DIR/file: $DIR/file is a file", "a folder, or a place where one can be made",
         "Give a folder, or move the file away.", "folders_to_write_are_no_files", {"file": ""}),
    Case("--rollout-data-dir $DIR/file/data", "--rollout-data-dir $DIR/file/data: $DIR/file is a file",
         "a folder, or a place where one can be made", "Give a folder, or move the file away.",
         "folders_to_write_are_no_files", {"file": ""}),
    Case("--hf-checkpoint $DIR/nowhere", "--hf-checkpoint $DIR/nowhere: no config.json there",
         "a Hugging Face folder on this machine", "Name such a folder; `hf download", _KNOWN),
    Case("--hf-checkpoint $DIR", "--hf-checkpoint $DIR/config.json: not JSON", "a JSON object", "Correct the file.",
         _KNOWN, files={"config.json": "{"}),
    Case("", "config.json: model_type is 'gpt2'", "qwen2, qwen3, qwen3_moe, llama, glm, deepseek_v3",
         "Choose a model of an allowed type.", _KNOWN,
         config={"model_type": "gpt2"}),
    Case("", "config.json: topk_method is left out", "noaux_tc", 'Add "topk_method": "noaux_tc" to config.json',
         "the_router_names_its_method", config={**LATENT_CONFIG, "topk_method": None}),
    Case("", "config.json: topk_method is greedy", "noaux_tc", 'Add "topk_method": "noaux_tc" to config.json',
         "the_router_names_its_method", config={**LATENT_CONFIG, "topk_method": "greedy"}),
    Case("--mtp-num-layers 1", "--mtp-num-layers is 1", "left out", "Give as many as the checkpoint has, or leave it",
         "layers_for_further_tokens_are_in_the_checkpoint"),
    Case("--mtp-num-layers 2", "--mtp-num-layers is 2", "1 to 1", "Give as many as the checkpoint has, or leave it",
         "layers_for_further_tokens_are_in_the_checkpoint", config={**LATENT_CONFIG, "num_nextn_predict_layers": 1}),
    Case("--mtp-num-layers 1 --custom-model-provider-path right_hooks.model_provider",
         "--mtp-num-layers 1 with --custom-model-provider-path right_hooks.model_provider", "one of them",
         "Leave out one of the two.", "layers_for_further_tokens_are_in_the_checkpoint",
         files={"right_hooks.py": "def model_provider(pre_process, post_process, vp_stage=None): return None"},
         config={**LATENT_CONFIG, "num_nextn_predict_layers": 1}),
    Case("--mtp-num-layers 1 --mtp-use-repeated-layer", "--mtp-use-repeated-layer is given", "left out",
         "Leave it out.", "layers_for_further_tokens_are_in_the_checkpoint",
         config={**LATENT_CONFIG, "num_nextn_predict_layers": 1}),
    Case(f"--mtp-num-layers 1 {_LAYOUT} Et|ttL", "has 0 m on its last stage and 0 on others, --mtp-num-layers is 1",
         "1 m on the last stage", "Write one m before L", _PLACES,
         config={**LATENT_CONFIG, "num_nextn_predict_layers": 1}),
    Case(f"--mtp-num-layers 1 {_LAYOUT}=E(t|)*2m|tL", "has 0 m on its last stage and 1 on others",
         "1 m on the last stage", "Write one m before L", _PLACES,
         config={**LATENT_CONFIG, "num_nextn_predict_layers": 1}),
    Case(f"{_LAYOUT} Et|tm*2L", "has 2 m on its last stage and 0 on others, --mtp-num-layers is left out", "no m",
         "Leave out m, or give --mtp-num-layers.", _PLACES),
    Case(f"--mtp-num-layers 1 --advantage-estimator ppo {_LAYOUT} EttmL", "is given with both --mtp-num-layers and",
         "two of the three", "Leave out --pipeline-model-parallel-layout", _PLACES,
         config={**LATENT_CONFIG, "num_nextn_predict_layers": 1}),
    Case("", "config.json: kv_lora_rank is 24", "512 on a CPU", "Run it on a GPU",
         "latent_attention_on_a_cpu_has_its_sizes", config={**LATENT_CONFIG, "kv_lora_rank": 24}),
    Case("", "config.json: qk_rope_head_dim is 8", "64 on a CPU", "Run it on a GPU",
         "latent_attention_on_a_cpu_has_its_sizes", config={**LATENT_CONFIG, "qk_rope_head_dim": 8}),
    Case("--tensor-model-parallel-size 3 --actor-num-gpus-per-node 3 --rollout-batch-size 6",
         "--tensor-model-parallel-size is 3, the model's config.json has num_attention_heads 16", "a divisor of 16",
         "Change --tensor-model-parallel-size.", "tensor_size_divides_the_heads"),
    Case("--pipeline-model-parallel-size 3 --actor-num-gpus-per-node 3 --rollout-batch-size 6",
         "--pipeline-model-parallel-size is 3, the model's config.json has num_hidden_layers 28", "a divisor of 28",
         "Change --pipeline-model-parallel-size.", "pipeline_size_divides_the_layers"),
    Case("--num-layers 36", "--num-layers is 36, but config.json (num_hidden_layers) has 28", "28, or left out",
         "Leave out --num-layers", "shape_flags_agree_with_the_config"),
    Case("--use-rollout-routing-replay", "--use-rollout-routing-replay with --hf-checkpoint",
         "a mixture-of-experts model", "Leave out --use-rollout-routing-replay.", "routes_come_from_experts"),
    Case("--use-score-centering --score-centering-top-k 513", "--score-centering-top-k is 513", "512 or less",
         "Lower --score-centering-top-k.", "candidates_fit_the_vocabulary"),
    Case("--padded-vocab-size 500", "--padded-vocab-size is 500", "512 or more", "Leave out --padded-vocab-size.",
         "padding_holds_the_vocabulary"),
    Case("--rollout-max-response-len 5000", "Prompt and response may have 5000 tokens, the model's context",
         "4096 or fewer tokens together", "Lower --rollout-max-response-len, or give --rollout-max-context-len 4096.",
         "model_context_holds_a_sequence"),
    Case("--prompt-data $DIR/absent.jsonl@[0:8]", "--prompt-data $DIR/absent.jsonl: no such file or folder",
         "a file that exists", "Correct the path.", "prompt_file_exists"),
    Case("--eval-interval 1 --eval-prompt-data $DIR/absent.jsonl", "--eval-prompt-data $DIR/absent.jsonl: no such file",
         "a file that exists", "Correct the path.", "evaluation_files_exist"),
    Case("--use-kl-loss --ref-load $DIR/absent", "--ref-load $DIR/absent: no such file", "a folder that exists",
         "Correct the path.", "folders_to_load_exist"),
    Case("--use-opd --opd-type megatron --opd-teacher-load $DIR/absent", "--opd-teacher-load $DIR/absent: no such file",
         "a folder that exists", "Correct the path.", "folders_to_load_exist"),
    Case("--load $DIR/committed_3.json", "--load $DIR/committed_3.json: no such file", "a committed_N.json file",
         "Correct the path.", "commit_to_load_exists"),
    Case("--load-debug-rollout-data $DIR/0.pt", "--load-debug-rollout-data $DIR/0.pt: no such file",
         "a file that exists", "Correct the path.", "stored_samples_exist"),
    _mount("mount.json: writeback is True", "false", writeback=True),
    _mount("mount.json: direct_mount is False", "true", direct_mount=False),
    _mount("mount.json: open_cache is 1", "0", open_cache=1),
    _mount("mount.json: readdir_cache is left out", "false", readdir_cache=None),
    _mount("mount.json: client_version is ''", "text", client_version=""),
    Case(_MOUNT, "mount.json has the key 'write_back'", "writeback", "Correct the key.", "declared_mount_is_safe",
         {"mount.json": json.dumps({**_DECLARED, "write_back": False})}),
    Case(_MOUNT, "--rollout-storage-declaration $DIR/mount.json: No such file", "a readable file", "Correct the path.",
         "declared_mount_is_safe"),
    Case(_EVAL, "--eval-config absent.jsonl: no such file", "a file that exists", "Correct the path.",
         "evaluation_files_exist", {"eval.yaml": "eval: {datasets: [{name: a, path: absent.jsonl}]}"}),
    Case(_EVAL, "eval.yaml: rm_type of a is 'mth'", "math, random", "Choose one of these",
         "evaluation_rewards_are_known",
         {"eval.yaml": "eval: {datasets: [{name: a, path: prompts.jsonl, rm_type: mth}]}"}),
    _evaluation("eval: {datasets: []}", "eval.yaml: eval.datasets is empty", "one data set or more",
                "Correct the file."),
    _evaluation("eval: {defaults: {temprature: 1}, datasets: [{name: a, path: b}]}",
                "eval.yaml: eval.defaults has the unknown key temprature", "temperature", "Correct the file."),
    _evaluation("eval: {datasets: [{name: a}]}", "eval.yaml: eval.datasets[0] has no path", "", "Add the key path."),
    _evaluation("eval: {datasets: [{name: a, path: b, top_p: 2}]}", "eval.datasets[0].top_p is 2.0", "1 or less",
                "Correct the file."),
    _evaluation("[1]", "--eval-config $DIR/eval.yaml", "keys with values", "Correct the file."),
    _roles("megatron: [{role: judge}]", "megatron[0].role is 'judge'", "actor, critic", "Correct the file."),
    _roles("megatron: [{role: actor}, {role: actor}]", "megatron[1] is a second actor", "", "Correct the file."),
    _roles("megatron: [{role: critic}]", "megatron[0].role is critic with --advantage-estimator grpo", "ppo",
           "Remove the entry.", "a_critics_entry_has_a_critic"),
    _roles("megatron: [{role: actor, overrides: {lr: fast}}]", "megatron[0].overrides.lr is 'fast'", "a number",
           "Correct the file."),
    _roles("megatron: [{role: actor, overrides: {num_rollout: 3}}]",
           "megatron[0].overrides.num_rollout is a flag of the whole run", "lr, clip_grad", "Give --num-rollout on the",
           "roles_override_what_they_may"),
    _roles("megatron: [{role: actor, overrides: {lr: -1}}]", "megatron[0].overrides.lr is -1", "0 or more",
           "Correct the value.", "roles_override_what_they_may"),
    _roles("megatron: [{role: actor, overrides: {tensor_model_parallel_size: 2}}]",
           "megatron[0] overrides tensor_model_parallel_size", "left out", "Give it on the command line",
           "roles_have_the_same_layout"),
    _groups(f"vllm: [{{name: a, {_ONE_GROUP}}}, {{name: a, {_ONE_GROUP}}}]",
            "vllm[1].name is 'a' again", "a name of its own", "Correct the file."),
    _groups("vllm: [{name: a, server_groups: [{worker_type: fast, num_gpus: 1}]}]",
            "server_groups[0].worker_type is 'fast'", "regular, prefill, decode, placeholder", "Correct the file."),
    _groups("vllm: [{name: a, server_groups: [{worker_type: regular, num_gpus: 3, num_gpus_per_engine: 2}]}]",
            "server_groups[0].num_gpus is 3", "a multiple of 2", "Correct the file."),
    Case("--use-routing-replay", "--use-routing-replay with --hf-checkpoint", "a mixture-of-experts model",
         "Leave out --use-routing-replay.", "routes_come_from_experts"),
    Case("--tensor-model-parallel-size 8 --actor-num-gpus-per-node 8",
         "--tensor-model-parallel-size is 8, the model's config.json has num_key_value_heads 6", "a divisor of 6",
         "Change --tensor-model-parallel-size.", "tensor_size_divides_the_heads", config={"num_key_value_heads": 6}),
    _mount("mount.json: open_cache is False", "0", open_cache=False),
    _mount("mount.json: open_cache is '0'", "0", open_cache="0"),
    _mount("mount.json: client_version is 1.3", "text", client_version=1.3),
    _mount("mount.json: durability_description is ' '", "text", durability_description=" "),
    _mount("mount.json: durability_description is 1", "text", durability_description=1),
    _evaluation("eval: [1]", "eval.yaml: eval is [1]", "a table", "Correct the file."),
    _roles("[1]", "--megatron-config-path $DIR/roles.yaml", "keys with values", "Correct the file."),
    _roles("megatron: [{role: actor, overrides: 3}]", "megatron[0].overrides is 3", "a table", "Correct the file."),
    _roles("megatron: [{role: actor, overrides: {num_nodes: 2}}]", "megatron[0] overrides num_nodes", "left out",
           "Give it on the command line", "roles_have_the_same_layout"),
    _groups("vllm: 3", "groups.yaml: vllm is 3", "a list", "Correct the file."),
    _groups("vllm: [{name: a}]", "vllm[0] has no server_groups", "", "Add the key server_groups."),
    _groups("vllm: [{name: a, server_groups: [{worker_type: decode, num_gpus: 2}]}]",
            "vllm[0].server_groups has decode engines and no prefill engines", "both", "Correct the file."),
    _groups("vllm: [{name: a, server_groups: [{worker_type: regular, num_gpus: two}]}]", "num_gpus is 'two'",
            "a whole number", "Correct the file."),
    _groups("vllm: [{name: a, server_groups: [{worker_type: regular, num_gpus: 0}]}]", "num_gpus is 0",
            "1 or more", "Correct the file."),
    _groups("vllm: [{name: a, server_groups: [{worker_type: regular, num_gpus: 2, num_gpus_per_engine: x}]}]",
            "num_gpus_per_engine is 'x'", "a whole number", "Correct the file."),
    _groups("vllm: [{name: a, server_groups: [{worker_type: regular, num_gpus: 2, num_gpus_per_engine: 0}]}]",
            "num_gpus_per_engine is 0", "1 or more", "Correct the file."),
)  # fmt: skip
