"""Words and files that can't be read as settings."""

from tests.vime.settings.wrong_inputs.case import Case

_LISTED = "`vime train --help` lists every flag."

CASES = (
    Case("--rollout-batchsize 4", "--rollout-batchsize is not a flag", "--rollout-batch-size", _LISTED),
    Case("--epsclip 0.1", "--epsclip is not a flag", "the nearest one is --eps-clip", _LISTED),
    Case("--use-tsi", "--use-tsi is not a flag", "--use-tis", _LISTED),
    Case("--lr fast", "Argument --lr: invalid float value: 'fast'", "float", _LISTED),
    Case("--num-rollout 2.5", "Argument --num-rollout: invalid int value: '2.5'", "int", _LISTED),
    Case("--advantage-estimator grp", "Argument --advantage-estimator: invalid choice: 'grp'", "'grpo'", _LISTED),
    Case("--eps-clip -1", "--eps-clip is -1.0", "0 or more", "Correct the value."),
    Case("--rollout-temperature 0", "--rollout-temperature is 0.0", "more than 0", "Correct the value."),
    Case("--rollout-temperature nan", "--rollout-temperature is nan", "a finite number", "Correct the value."),
    Case("--rollout-top-p 1.5", "--rollout-top-p is 1.5", "more than 0, 1 or less", "Correct the value."),
    Case("--eps-clip-c 1", "--eps-clip-c is 1.0", "more than 1", "Correct the value."),
    Case("--rollout-cleanup-timeout 0", "--rollout-cleanup-timeout is 0.0", "more than 0", "Correct the value."),
    Case("--routing-replay-prefetch-microbatches -1", "microbatches is -1", "0 or more", "Correct the value."),
    Case(
        "--rollout-queue-lease-seconds 0", "--rollout-queue-lease-seconds is 0.0", "more than 0", "Correct the value."
    ),
    Case("--rollout-queue-segment-mib 0", "--rollout-queue-segment-mib is 0", "1 or more", "Correct the value."),
    Case("--rollout-io-concurrency 0", "--rollout-io-concurrency is 0", "1 or more", "Correct the value."),
    Case("--vllm-router-port 99999", "--vllm-router-port is 99999", "1 to 65535", "Correct the value."),
    Case("--rollout-external-engine-addrs node3", "--rollout-external-engine-addrs is node3", "host:port", "Correct"),
    Case("--custom-rm-path reward:score", "--custom-rm-path is reward:score", "package.module.function", "Correct"),
    Case("--multimodal-keys [1]", "Argument --multimodal-keys: '[1]'", "JSON object", _LISTED),
    Case("--train-backend fsdp", "Argument --train-backend: invalid choice: 'fsdp'", "'megatron'", _LISTED),
    Case(
        "--config $DIR/job.toml",
        "job.toml: data.rollout_batchsize is not a setting",
        "the nearest one is rollout_batch_size",
        "Correct the key.",
        files={"job.toml": "[data]\nrollout_batchsize = 4\n"},
    ),
    Case(
        "--config $DIR/job.yaml",
        "job.yaml: trainer.lr is 'fast' (str)",
        "a number",
        "Correct the file.",
        files={"job.yaml": "trainer: {lr: fast}\n"},
    ),
    Case(
        "--config $DIR/job.toml",
        "job.toml: data.num_rollout is 2.5 (float)",
        "an integer",
        "Correct the file.",
        files={"job.toml": "[data]\nnum_rollout = 2.5\n"},
    ),
    Case(
        "--config $DIR/job.toml",
        "--config $DIR/job.toml: Expected ']'",
        "TOML",
        "Name a readable TOML or YAML file.",
        files={"job.toml": "[data\n"},
    ),
    Case(
        "--config $DIR/absent.toml",
        "--config $DIR/absent.toml: No such file or directory.",
        "TOML or YAML",
        "Name a readable TOML or YAML file.",
    ),
    Case(
        "--config $DIR/prompts.jsonl",
        "--config $DIR/prompts.jsonl: line 2, column 1: expected '<document start>'",
        "TOML or YAML",
        "Name a readable TOML or YAML file.",
        files={"prompts.jsonl": '{"prompt": "a"}\n{"prompt": "b"}\n'},
    ),
    Case(
        "--config $DIR/job.yaml",
        "job.yaml: line 2: the key 'lr' is there twice",
        "YAML",
        "Name a readable TOML or YAML file.",
        files={"job.yaml": "trainer:\n  lr: 1\n  lr: 2\n"},
    ),
    Case(
        "--custom-config-path $DIR/more.yaml",
        "more.yaml: eps_clp is not a setting",
        "the nearest one is eps_clip",
        "Correct the key.",
        files={"more.yaml": "eps_clp: 0.1\n"},
    ),
    Case(
        "--custom-config-path $DIR/more.yaml",
        "more.yaml: eps_clip is -1.0",
        "0 or more",
        "Correct the value.",
        files={"more.yaml": "eps_clip: -1\n"},
    ),
    Case(
        "--custom-config-path $DIR/more.yaml",
        "--flush-cache-interval 4 with --colocate",
        "--flush-cache-interval 1 with --colocate",
        "Leave out --colocate or --flush-cache-interval.",
        rule="kept_requests_have_their_own_gpus",
        files={"more.yaml": "flush_cache_interval: 4\ncolocate: true\n"},
    ),
)
