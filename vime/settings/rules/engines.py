"""Rules on engines and router: whose they are, and flags of vLLM that vime sets itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vime.settings.groups import Settings
from vime.settings.owned_options import OWNED_VLLM_OPTIONS, STRICT_PARITY_OPTIONS, option_name
from vime.settings.rules.problem import Problem, problem
from vime.settings.rules.quantities import longest_sequence, num_rollout_gpus, option, own_engines, size

_SIZES = ("--vllm-pipeline-parallel-size", "--vllm-prefill-context-parallel-size", "--vllm-data-parallel-size")


def external_engines_have_no_server_groups(settings: Settings) -> Iterator[Problem]:
    """--vllm-config describes engines to start; those of others run already."""
    engine = settings.engine
    if engine.rollout_external_engine_addrs is not None and engine.vllm_config is not None:
        yield problem(
            settings,
            "--rollout-external-engine-addrs --vllm-config",
            allowed="one of them",
            reason="--vllm-config describes engines that vime starts.",
            next_step="Leave out one of the two.",
        )


def a_served_model_is_updated(settings: Settings) -> Iterator[Problem]:
    """Rollouts are sampled from the model that is trained; the others of the file score and judge."""
    path, engines = settings.engine.vllm_config, own_engines(settings)
    if path is not None and engines and not any(spec.is_trained and spec.kind != "placeholder" for spec in engines):
        yield problem(
            settings,
            "--vllm-config",
            found=f"{path} has no engine of a model with update_weights: true",
            allowed="a regular group of one",
            reason="Rollouts are sampled from the model that is trained, under the weights that the trainer publishes.",
            next_step="Set update_weights: true for the model that makes the rollouts.",
        )


def prefill_servers_leave_some_to_decode(settings: Settings) -> Iterator[Problem]:
    """Prefill engines hand over to decode engines, so both kinds must exist."""
    prefill = settings.engine.prefill_num_servers or 0
    engines = num_rollout_gpus(settings) // settings.cluster.rollout_num_gpus_per_engine
    if settings.engine.vllm_config is None and prefill >= max(engines, 1):
        yield problem(
            settings,
            "--prefill-num-servers --rollout-num-gpus",
            found=f"--prefill-num-servers is {prefill}, with {engines} engines in all",
            allowed="fewer than the engines",
            reason="At least one engine must decode.",
            next_step="Lower --prefill-num-servers or raise --rollout-num-gpus.",
        )


def prefill_servers_are_named_once(settings: Settings) -> Iterator[Problem]:
    """Server groups of --vllm-config have a worker type of their own."""
    if settings.engine.prefill_num_servers and settings.engine.vllm_config is not None:
        yield problem(
            settings,
            "--prefill-num-servers --vllm-config",
            allowed="one of them",
            reason="--vllm-config names the prefill groups itself.",
            next_step="Leave out --prefill-num-servers.",
        )


def engine_sizes_divide_its_gpus(settings: Settings) -> Iterator[Problem]:
    """The tensor size is what remains of the engine's GPUs after the other sizes."""
    total = settings.cluster.rollout_num_gpus_per_engine
    sizes = {flag: size(settings.vllm_args, flag) for flag in _SIZES if option(settings.vllm_args, flag) is not None}
    product = math.prod(sizes.values())
    if total % product:
        given = " x ".join(f"{flag} {value}" for flag, value in sizes.items())
        yield Problem(
            (*sizes, "--rollout-num-gpus-per-engine"),
            f"{given} = {product} with --rollout-num-gpus-per-engine {total}",
            f"sizes whose product divides {total}",
            "An engine's GPUs are tensor x pipeline x prefill-context x data size; vime derives the tensor size.",
            "Change the sizes or --rollout-num-gpus-per-engine.",
        )


def engine_flags_are_not_vimes(settings: Settings) -> Iterator[Problem]:
    """A second value for what vime sets itself would win or lose silently."""
    for name, owner in OWNED_VLLM_OPTIONS.items():
        value = option(settings.vllm_args, f"--vllm-{name}")
        if value is not None:
            yield Problem(
                (f"--vllm-{name}",),
                f"--vllm-{name} is {value}".removesuffix(" is "),
                "left out",
                f"vime sets vLLM's --{name} itself. {owner}",
                f"Leave out --vllm-{name}.",
            )


def strict_parity_is_for_engines_that_vime_starts(settings: Settings) -> Iterator[Problem]:
    """Those of others run already, with options of their own."""
    engine = settings.engine
    if engine.backend_parity == "strict" and engine.rollout_external_engine_addrs is not None:
        yield problem(
            settings,
            "--backend-parity --rollout-external-engine-addrs",
            allowed="one of them",
            reason="Engines that someone else started have options of their own.",
            next_step="Leave out --backend-parity, and start those engines with a head in float32.",
        )


def strict_parity_sets_its_options_alone(settings: Settings) -> Iterator[Problem]:
    """A second value for what it sets would undo it silently."""
    given = [word for word in settings.vllm_args if _vllm_option(word) in STRICT_PARITY_OPTIONS]
    if settings.engine.backend_parity == "strict" and given:
        yield Problem(
            ("--backend-parity",),
            f"--backend-parity strict with {given[0].partition('=')[0]}",
            "one of them",
            "--backend-parity strict sets that option of vLLM itself.",
            f"Leave out {given[0].partition('=')[0]}, or --backend-parity strict.",
        )


def _vllm_option(word: str) -> str:
    return option_name(word).removeprefix("vllm-").removeprefix("no-")


def strict_parity_excludes_routes(settings: Settings) -> Iterator[Problem]:
    """vLLM returns the experts of a prompt from its prefix cache."""
    if settings.engine.backend_parity == "strict" and settings.objective.use_rollout_routing_replay:
        yield problem(
            settings,
            "--backend-parity --use-rollout-routing-replay",
            allowed="one of them",
            reason="Strict parity switches prefix caching off, and vLLM's return of routed experts needs it.",
            next_step="Leave out --backend-parity strict; replayed routes remove the larger difference.",
        )


def engine_context_holds_a_sequence(settings: Settings) -> Iterator[Problem]:
    """The engine refuses requests beyond its context, which would fail every long group."""
    value = option(settings.vllm_args, "--vllm-max-model-len")
    longest = longest_sequence(settings)
    if value is not None and value.isascii() and value.isdigit() and longest > int(value):
        yield problem(
            settings,
            "--rollout-max-prompt-len --rollout-max-response-len --rollout-max-context-len",
            found=f"Prompt and response may have {longest} tokens, --vllm-max-model-len is {value}",
            allowed=f"{value} or fewer tokens together",
            reason="The engine refuses longer requests.",
            next_step="Raise --vllm-max-model-len, or lower --rollout-max-response-len or --rollout-max-prompt-len.",
        )


def router_host_has_a_port(settings: Settings) -> Iterator[Problem]:
    """A router that runs already is found by host and port."""
    if settings.router.vllm_router_ip is not None and settings.router.vllm_router_port is None:
        yield problem(
            settings,
            "--vllm-router-ip --vllm-router-port",
            allowed="both",
            reason="A router that runs already is found by host and port.",
            next_step="Give --vllm-router-port N.",
        )


def router_flags_are_for_an_own_router(settings: Settings) -> Iterator[Problem]:
    """Flags reach only a router that vime starts."""
    if settings.router.vllm_router_ip is not None and settings.router_args:
        given = " ".join(settings.router_args)
        yield problem(
            settings,
            "--vllm-router-ip",
            found=f"--vllm-router-ip {settings.router.vllm_router_ip} with {given}",
            allowed="one of them",
            reason="--router-* flags are for a router that vime starts; this one runs already.",
            next_step="Configure that router where it is started.",
        )


RULES = (
    external_engines_have_no_server_groups,
    a_served_model_is_updated,
    prefill_servers_leave_some_to_decode,
    prefill_servers_are_named_once,
    engine_sizes_divide_its_gpus,
    engine_flags_are_not_vimes,
    strict_parity_is_for_engines_that_vime_starts,
    strict_parity_sets_its_options_alone,
    strict_parity_excludes_routes,
    engine_context_holds_a_sequence,
    router_host_has_a_port,
    router_flags_are_for_an_own_router,
)
