"""What the page of `generate_performance_doc.py` tells of benchmarks that need no GPU, and what is wanted of them."""

from __future__ import annotations

Row = tuple[str, str, float, str]
"""Value, comparison, floor, meaning; no comparison where the value is only told."""

KILL_COUNTS: list[Row] = [
    ("lost", "<=", 0, "groups lost"),
    ("trained_twice", "<=", 0, "samples trained twice"),
    ("skipped_prompts", "<=", 0, "prompts skipped, taken twice or out of turn"),
    ("version_regressions", "<=", 0, "steps whose version is below that of a step before"),
    ("orphans", "<=", 0, "processes that outlived their session"),
    ("stuck", "<=", 0, "sessions that stood still or ended for no reason"),
    ("seconds_a_kill", "", 0, "seconds a kill, restarts included"),
]
ROWS: dict[str, list[Row]] = {
    "storage_write": [
        (
            "bytes_per_sample_mib",
            "<=",
            9.2,
            "MiB on disk for a sample of 8k tokens, 48 x top-8 routes, 128-entry heads",
        ),
        ("write_over_straw_record", ">=", 0.9, "durable bytes/s, over one straw record of the same bytes"),
        ("sample_rate_over_reference", ">=", 1.8, "samples/s, over int32 routes and float32 heads field by field"),
        ("write_over_raw", "", 0, "durable bytes/s, over one append and fdatasync"),
        ("small_write_over_one_by_one", ">=", 5, "groups/s of 100 kB, brought together over one by one"),
    ],
    "queue_ops": [
        ("ops_over_straw_rpc", ">=", 3, "items/s, over straw's own RPC one by one"),
        ("ops_over_raw", ">=", 0.5, "items/s, over three synced appends an item (goal: 1.0)"),
    ],
    "shard_read": [
        ("bytes_over_shard", "<=", 1.25, "bytes read by one of 8 ranks, over its shard"),
        ("peak_over_shard", "<=", 2, "peak memory of it, over its shard"),
    ],
    "routing_replay": [
        ("max_gap_cut", ">=", 3, "largest distance of fp32 trainer and bf16 sampler, without over with replay"),
        ("k3_gap_cut", ">=", 3, "mean k3 distance of them, without over with replay"),
    ],
    "history": [
        ("restart_ratio", "<=", 1.3, "time to restart, long over short history"),
        ("memory_ratio", "<=", 1.3, "memory of that"),
        ("restart_ratio_gc", "<=", 1.3, "time to restart, storage reclaimed"),
        ("memory_ratio_gc", "<=", 1.3, "memory of that"),
        ("disk_ratio", "<=", 1.3, "bytes on disk, storage reclaimed"),
    ],
    "recovery.restart": [
        (
            "kill_to_step_over_cold_start_standin",
            "<=",
            1.2,
            "time to the first step after kill -9 of every process, over a cold start's; stand-in engine",
        ),
        ("cold_start_s_standin", "", 0, "seconds from the command to the first step"),
        ("kill_to_step_over_cold_start_real_engine", "<=", 1.2, "the same on vLLM itself"),
        ("cold_start_s_real_engine", "", 0, "seconds from the command to the first step"),
    ],
    "chaos": [
        ("kills", ">=", 500, "kills by SIGKILL, at named steps and random moments, on stand-in engines"),
        *KILL_COUNTS,
    ],
    "chaos_real_engine": [
        ("kills", ">=", 100, "the same on vLLM itself"),
        *KILL_COUNTS,
    ],
    "recovery.history": [
        ("history_ratio", "<=", 1.3, "time to open the queue with 100,000 trained groups behind it, over 100"),
    ],
    "recovery.failover": [
        ("failover_gap_s", "<=", 5, "seconds that the stream stands still when its coordinator is killed"),
        ("failover_steps_before_s", "", 0, "seconds that as many steps take without a kill"),
    ],
    "recovery.juicefs": [
        (
            "juicefs_gap_over_release_s",
            "<=",
            5,
            "seconds from the release of a dead JuiceFS client's locks until a successor has the queue open",
        ),
        ("juicefs_lock_release_s", "", 0, "seconds until JuiceFS releases them"),
    ],
    "packing": [
        ("fill", ">=", 0.98, "tokens of 10,000 sequences over what their microbatches could hold"),
        ("imbalance", "<=", 1.02, "most tokens of a rank over the mean of 8 ranks"),
        ("seconds", "<=", 0.2, "processor time to pack"),
        ("first_fit_fill", "", 0, "first fit in order of arrival"),
        ("first_fit_seconds", "", 0, "processor time of that"),
    ],
    "logprob_memory": [
        ("memory_over_dense", "<=", 0.15, "peak memory of the output head with score centering, over the dense one"),
        ("time_over_dense_logprob", "<=", 1.5, "time of that, over the dense one's log-probabilities alone"),
    ],
    "staleness": [
        ("reward_first", "", 0, "mean reward of the start's weights"),
        ("staleness_none", "", 0, "age of the trained samples in policy versions"),
        ("reward_last_clip", ">=", 0.5, "reward of the last tenth of the steps with the clipped objective: it learns"),
        ("reward_last_tis", "", 0, "with truncated importance weights and no clip"),
        ("reward_last_none", "<=", 0.1, "without any correction: it collapses"),
    ],
    "delta": [
        ("bytes_over_full", "<=", 0.1, "bytes of a step's delta over those of a whole version, lr 1e-6 in bf16"),
        ("bytes_over_full_overwrite", "", 0, "the same with the encoding overwrite"),
        ("density", "", 0, "share of the bytes that a step changed"),
        ("bit_equal", ">=", 1, "share of the pulls that left exactly the trainer's weights"),
        ("refused_and_repaired", ">=", 1, "share of damaged versions that were refused, then repaired"),
    ],
    "sample_path": [
        ("head_over_stock", ">=", 10, "tokens/s with a 128-entry head, over vLLM's own JSON route"),
        ("logprob_ratio", ">=", 0.9, "tokens/s with the sampler's log-probabilities, over tokens alone"),
        ("head_ratio", ">=", 0.7, "tokens/s with the head, over tokens alone"),
        ("routes_ratio", "", 0, "tokens/s with routes of a mixture of experts, over tokens alone"),
        ("stock_logprob_ratio", "", 0, "vLLM's own route with log-probabilities, over tokens alone"),
        ("stock_head_ratio", "", 0, "vLLM's own route with the head, over tokens alone"),
    ],
    "publish": [
        (
            "dense_keep_cost_over_abort_cost",
            "<=",
            0.3,
            "a dense model: pause and what is generated again, requests kept over aborted",
        ),
        ("dense_requests_finished", ">=", 1, "share of the requests under 100 publications that came back whole"),
        ("dense_spans_exact", ">=", 1, "share of them whose every token fits the weights of its label"),
        ("dense_error_own_kv", "<=", 1e-4, "greatest difference of a log-probability whose KV is of its version"),
        ("dense_error_fresh_engine", "<=", 1e-4, "the same against an engine started with that version"),
        (
            "moe_keep_cost_over_abort_cost",
            "<=",
            0.3,
            "a mixture of experts: pause and what is generated again, requests kept over aborted",
        ),
        ("moe_requests_finished", ">=", 1, "share of the requests under 100 publications that came back whole"),
        ("moe_spans_exact", ">=", 1, "share of them whose every token fits the weights of its label"),
        ("moe_error_own_kv", "<=", 1e-4, "greatest difference of a log-probability whose KV is of its version"),
        ("moe_error_fresh_engine", "<=", 1e-4, "the same against an engine started with that version"),
    ],
}
"""Benchmark -> its rows, in the order of the page."""
