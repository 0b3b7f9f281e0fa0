"""What the page of `generate_performance_doc.py` tells of benchmarks on GPUs, and what is wanted of them."""

from __future__ import annotations

from performance_rows import Row

STREAM: list[Row] = [
    ("stream_over_slower", ">=", 0.85, "trained tokens/s, over the slower of generation and training alone"),
    ("stream_over_turns", "", 0, "over vime itself with generation and training in turn"),
    ("turns_ceiling", "", 0, "what both sides alone would allow that ratio to be"),
    ("ceiling_share", ">=", 0.9, "how much of that it is"),
    ("generation_tokens_per_s", "", 0, "the engine alone, with log-probabilities"),
    ("training_tokens_per_s", "", 0, "training alone"),
    ("trainer_idle_share", "", 0, "share of the stream's time in which the trainer waits for samples"),
]


def sound(job: str, words: str) -> list[Row]:
    """Rows of what holds for every job of the suite."""
    return [
        (f"{job}_lost", "<=", 0, f"groups that were lost; {words}"),
        (f"{job}_trained_twice", "<=", 0, "groups that were trained twice"),
        (f"{job}_parity_mean", "<=", 0.02, "trainer against engine, mean difference of log-probabilities"),
    ]


SMOKES: list[Row] = [
    row
    for job, words in (
        ("colocated", "trainer and engine by turns in the same memory"),
        ("ppo", "a critic, and a trainer that leaves its memory"),
        ("full", "an engine of others, whole versions through a folder"),
        ("delta", "an engine of others, deltas through a folder"),
    )
    for row in (
        *sound(job, words),
        (f"{job}_loss", "", 0.0, "loss of the last step"),
    )
]


def at_balance(name: str, words: str) -> list[Row]:
    """Rows of the stream at another balance."""
    return [(f"{name}_{value}", comparison, floor, f"{words}: {what}") for value, comparison, floor, what in STREAM]


KEPT: list[Row] = [
    ("keep_pause_s", "", 0, "the pause, weights changed between two steps"),
    ("keep_swap_s", "", 0, "the call that changes them, as its caller sees it"),
    ("keep_change_s", "", 0, "seconds in which no request is let in"),
    ("keep_prepare_s", "", 0, "seconds before that, in which the engine samples on"),
]
OTHER_MODES: list[Row] = [
    ("halt_pause_s", "", 0, "the pause with a halt, requests kept"),
    *[(f"halt_{part}_s", "", 0.0, f"of it: {part}") for part in ("stop", "open", "load", "close", "resume")],
    ("streamed_pause_s", "", 0, "the pause when weights are sent in it"),
    ("keep_lost_s", "", 0, "seconds of sampling lost in the ten around it, weights changed between two steps"),
    ("halt_lost_s", "", 0, "with a halt"),
    ("wait_lost_s", "", 0, "requests waited for"),
    ("abort_lost_s", "", 0, "requests aborted"),
    ("wait_pause_s", "", 0, "the pause, requests waited for"),
    ("abort_pause_s", "", 0, "requests aborted"),
]
ON_DISK: list[Row] = [
    ("delta_over_full", "<=", 0.1, "bytes of a delta on disk over a whole version"),
    ("full_bytes", "", 0, "of a whole version"),
    ("full_s", "", 0, "seconds of a whole version through a folder"),
    ("delta_s", "", 0, "of a delta"),
]

ROWS: dict[str, list[Row]] = {
    "gpu.correct": [
        ("parity_mean", "<=", 0.02, "trainer against engine in bf16, mean difference of log-probabilities"),
        ("parity_max", "", 0, "the largest of them"),
        ("raw_adds", "", 0, "added to the mean by log-probabilities before the temperature"),
        ("head_adds", "", 0, "by an output head in bf16"),
        ("cached_adds", "", 0, "by prefix cache and asynchronous scheduling, under unchanged weights"),
        ("unsalted_adds", "", 0, "by a prefix cache of the weights before the last step"),
        ("salted_adds", "", 0, "by a prefix cache that is salted with the version, as vime does it"),
        ("kept_adds", "", 0, "by keys and values that a running request keeps over a publication"),
        ("stale_adds", "", 0, "by an engine that has missed a publication"),
        ("bf16_mean", "", 0, "one rank in bf16 against float32, mean difference of log-probabilities"),
        ("bf16_max", "", 0, "the largest of them"),
        ("bf16_grad_norm", "<=", 0.05, "relative difference of the norm of a step's gradient"),
        ("packed_max", "", 0, "sequences packed together against one by one, largest difference in bf16"),
        ("packed_max_fp32", "<=", 1e-3, "the same in float32"),
        ("moe_max", "", 0, "trainer against engine of a mixture of experts, largest difference"),
        ("moe_max_replayed", "", 0, "with the sampler's routes replayed"),
        ("moe_k3", "", 0, "mean k3 distance of them"),
        ("moe_k3_replayed", "", 0, "with the sampler's routes replayed"),
    ],
    "gpu.smokes": [
        *SMOKES,
        ("ppo_value_loss", "", 0, "of the critic in the last step"),
        ("colocated_freed_gib", "", 0, "GiB that the sleeping engine gave back, the least of all sleeps"),
        ("full_bytes", "", 0, "of a publication through a folder into an engine of others, whole"),
        ("delta_bytes", "", 0, "of one as what has changed"),
        ("prefill_refused", ">=", 1, "prefill engines are refused by name"),
    ],
    "gpu.stream": [
        *STREAM,
        ("stream_tokens_per_s", ">=", 26639, "trained tokens/s; wanted: 1.5 times those of TRL 1.16 on such a machine"),
        ("stream_over_peer", ">=", 1.5, "the same over those of TRL 1.16 on two H200s"),
        ("publish_s", "", 0, "what the trainer waits for a publication"),
        ("publication_s", "", 0, "a publication of 1.2 GB from GPU to GPU, beside the training of the next batch"),
        ("pause_s", "", 0, "the engine's pause in it"),
        ("parity_mean", "<=", 0.02, "trainer against engine in bf16, mean difference of log-probabilities"),
        *at_balance("long_answers", "long answers, few at once"),
        *at_balance("long_prompts", "long prompts"),
    ],
    "gpu.layouts": [
        row
        for layout, words in (
            ("tensor", "tensor parallel"),
            ("pipeline", "pipeline parallel"),
            ("zigzag", "context parallel"),
            ("distributed", "data parallel, distributed optimizer"),
            ("experts", "expert parallel"),
            ("experts_distributed", "expert parallel, distributed optimizer"),
        )
        for row in (
            (
                f"{layout}_log_probs",
                "<=",
                0.5,
                f"{words}: two ranks in bf16 against one in fp32 after two steps, largest",
            ),
            (f"{layout}_metrics", "", 0.0, "the same of a metric"),
        )
    ]
    + [
        (
            "max_gap_cut",
            ">=",
            3,
            "largest distance of trainer and sampler of a mixture, without over with replayed routes",
        ),
        ("k3_gap_cut", ">=", 3, "mean k3 distance of them, without over with replay"),
    ],
    "gpu.learner": [
        ("tokens_per_s_8k", "", 0, "tokens/s of a step with 8k packed tokens"),
        ("tokens_per_s_32k", "", 0, "with 32k"),
        ("tflops_32k", "", 0, "operations of the model alone, in 10^12/s"),
        ("utilisation_32k", "", 0, "over what a plain product of matrices does in the same call"),
        ("mfu_8k", "", 0, "over the GPU's data sheet, 8k"),
        ("mfu_32k", "", 0, "over the GPU's data sheet, 32k"),
        ("peak_gib_32k", "", 0, "peak of memory, GiB"),
        ("busy_32k", "", 0, "share of the step in which the GPU works"),
        (
            "head_memory_with_entropy_over_dense",
            "<=",
            0.15,
            "memory of the output head with score centering and entropies over dense",
        ),
        ("head_time_with_entropy_over_dense", "<=", 1.5, "time of it over dense log-probabilities alone"),
        ("head_with_entropy_s", "", 0, "seconds of it, 8k tokens"),
        ("head_dense_s", "", 0, "of the dense one"),
        ("moe_step_s", "", 0, "seconds of a step of a mixture of 128 experts, 8k tokens"),
        ("moe_replay_step_s", "", 0, "with the sampler's routes"),
        ("replay_over_own", "<=", 1.1, "replayed routes over the trainer's own"),
    ],
    "gpu.sample_path": [
        ("logprob_ratio", ">=", 0.8, "tokens/s with the sampler's log-probabilities, over tokens alone; goal 0.95"),
        ("head_ratio", ">=", 0.75, "with a 128-entry head; goal 0.90"),
        ("stock_logprob_ratio", "", 0, "vLLM's own route with log-probabilities"),
        ("stock_head_ratio", "", 0, "vLLM's own route with the head"),
        ("head_over_stock", ">=", 10, "the head by vime's route over vLLM's own"),
        ("routes_ratio", "", 0, "routes of a mixture of experts, over tokens alone"),
        ("tokens_per_s_none", "", 0, "tokens alone"),
        ("queued_tokens_per_s_logprob", "", 0, "with log-probabilities through producers and queue"),
        ("queued_head_over_logprob", "", 0, "with the head through them, over that"),
    ],
    "gpu.sample_path.routes": [
        ("routes_ratio", "", 0, "routes of a mixture of experts, over tokens alone"),
        ("tokens_per_s_moe", "", 0, "tokens alone of the mixture"),
        ("tokens_per_s_routes", "", 0, "with their routes"),
    ],
    "gpu.publication": [
        ("pause_over_plain", "<=", 2.0, "the engine's pause over a plain broadcast of the bytes; goal 1.25"),
        ("plain_s", "", 0, "that broadcast"),
        *KEPT,
        (
            "ipc_pause_over_plain",
            "<=",
            2.0,
            "trainer and engine on one of two GPUs, over a broadcast between them; goal 1.25",
        ),
        ("ipc_pause_s", "", 0, "that pause"),
        ("ipc_prepare_s", "", 0, "seconds before it"),
        *OTHER_MODES,
        *ON_DISK,
    ],
    "gpu.publication.disk": ON_DISK,
    "gpu.queue_load": [
        ("straw_over_memory", "<=", 1.03, "step time with the queue on disk over samples in memory"),
        ("straw_step_s", "", 0, "seconds of a step, queue on disk"),
        ("memory_step_s", "", 0, "samples in memory"),
        ("straw_wait_s", "", 0, "of it the trainer's wait, queue on disk"),
        ("memory_wait_s", "", 0, "samples in memory"),
    ],
    "gpu.crash": [
        ("trainer_over_cold", "<=", 1.2, "kill -9 of the trainer to the next step, over a cold start"),
        ("engine_over_cold", "<=", 1.2, "of the engine"),
        ("tree_over_cold", "<=", 1.2, "of all processes, the same command given again"),
        ("cold_start_s", "", 0, "seconds from the command to the first step"),
        ("restarts", "", 0, "kills after which the command had to be given again"),
        ("lost", "<=", 0, "groups that the kills lost"),
        ("trained_twice", "<=", 0, "groups that were trained twice"),
    ],
    "gpu.learning": [
        ("async_over_sync", "<=", 1, "seconds to 0.9 exact reward, as a stream over synchronously"),
        ("async_s", "", 0, "seconds of the stream, without its start"),
        ("sync_s", "", 0, "synchronously"),
        ("async_steps", "", 0, "steps of the stream"),
        ("sync_steps", "", 0, "synchronously"),
        ("async_staleness_max", "<=", 4, "age of the oldest sample that the stream trained, in policy versions"),
    ],
    "gpu.reverse_run": [
        ("reward_first", "", 0, "exact reward of the first five steps"),
        ("reward_last", "", 0, "of the last five"),
        ("parity_mean", "<=", 0.02, "trainer against engine in bf16, mean difference of log-probabilities"),
        ("parity_mean_resumed", "<=", 0.02, "the same after kill -9 of the whole process tree and a resume"),
        ("lost", "<=", 0, "groups that the kill lost"),
        ("trained_twice", "<=", 0, "groups that were trained twice"),
        ("rolled_back", "", 0, "groups trained after the last commit, and anew after the resume"),
        ("cold_start_s", "", 0, "seconds from the command to the first step"),
        ("resume_over_cold", "<=", 1.2, "the same of the resume, over that"),
        ("step_s", "", 0, "seconds a step"),
        ("pause_s", "", 0, "the engine's pause in a publication"),
    ],
    "gpu.node.layouts": [
        ("outside", "<=", 0, "losses and gradient norms that differ from those of one rank in fp32 by more than 0.03"),
        ("dense_grad_norm", "", 0, "relative difference of the gradient norm of one rank in bf16"),
        ("moe_grad_norm", "", 0, "of a mixture of experts on one rank in bf16"),
        *(
            (f"chain{ranks}_grad_norm", "", 0, f"of {ranks} ranks whose layout changes at each resume")
            for ranks in (2, 4, 8)
        ),
        *((f"moe_spread{ranks}_grad_norm", "", 0, "of such with experts spread over ranks") for ranks in (4, 8)),
    ],
    "gpu.node.publication": [
        *(
            row
            for engines, workers in ((2, 1), (4, 1), (2, 2), (1, 2))
            for row in (
                (
                    f"{engines}x{workers}_pause_over_plain",
                    "<=",
                    2,
                    f"pause of {engines} x {workers} GPUs over a plain broadcast to them (goal: 1.25)",
                ),
                (f"{engines}x{workers}_pause_s", "", 0, "that pause in seconds"),
            )
        ),
        (
            "loss_publications",
            "",
            0,
            "publications until the others serve a new version when an engine is killed in one",
        ),
        ("loss_s", "", 0, "seconds of that"),
        ("loss_usual_s", "", 0, "seconds of a publication without a kill"),
        ("loss_return_s", "", 0, "seconds from the answering of the new process until it serves"),
        ("hash_moved_share", "<=", 0, "groups of the other engines that the router sends elsewhere after the loss"),
        ("hash_back_share", ">=", 1, "groups that are back where they were after the return"),
        ("hash_spread", "", 0, "groups of the fullest engine over an even share"),
    ],
    "gpu.node.stream": [
        ("scaling_2", ">=", 0.85, "trained tokens/s of 2 + 2 GPUs over twice those of 1 + 1 (goal: 0.95)"),
        ("scaling_4", ">=", 0.85, "of 4 + 4 over four times those (goal: 0.95)"),
        *(
            (f"at{size}_stream_over_slower", ">=", 0.85, f"{size} + {size}: over the slower of both sides alone")
            for size in (1, 2, 4)
        ),
        *((f"at{size}_stream_tokens_per_s", "", 0, f"{size} + {size}: trained tokens/s") for size in (1, 2, 4)),
        ("straw_over_memory", "<=", 1.03, "step time with the queue on disk, over samples in memory"),
    ],
    "gpu.node.colocation": [
        *(
            row
            for job, words in (
                ("engines", "ranks and as many engines by turns"),
                ("engine", "ranks and one engine over all GPUs by turns"),
                ("ppo", "a critic; the trainer leaves its GPUs"),
            )
            for row in (
                *sound(job, words),
                (f"{job}_step_s", "", 0, "seconds a step"),
                (f"{job}_freed_gib", "", 0, "GiB that a GPU got back from a sleeping engine"),
            )
        ),
        ("ppo_value_loss", "", 0, "of the critic in the last step"),
    ],
}
"""Benchmark -> its rows, in the order of the page."""

ROWS_IN: dict[str, list[Row]] = {
    "gpu_shared/gpu.publication": [
        ("pause_over_copy", "", 0, "the engine's pause over one copy of the bytes inside the GPU"),
        ("plain_s", "", 0, "that copy"),
        *KEPT,
        *OTHER_MODES,
        *ON_DISK,
    ],
}
"""Folder of results/benchmark -> its rows, where others than `ROWS` hold."""
