"""What a generate function of the user's own has to ask an engine for, so that its samples can be centered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import SettingsError


def score_centering_request(args: Any, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """`sampling_params` of a request, completed with temperature, top_p and the log-probabilities that are needed.

    `args` are the settings as hooks get them. With `rollout_top_p` 1 the answer must list `logprobs` = k + 1 tokens at
    each position: the sampled one comes on top, and the k most probable are kept. Below 1 it must have every token
    that top-p left, with normalised log-probabilities: the sample route's `nucleus`. Hand them to
    `Sample.append_response_tokens` as `score_centering_topk` or `score_centering_top_p`. Without score centering the
    parameters come back as they are.

    Raises `SettingsError` where a request differs from the sampling that the trainer assumes.
    """
    if not args.use_score_centering:
        return dict(sampling_params)
    top_p = args.rollout_top_p
    _refuse_other(sampling_params, "temperature", args.rollout_temperature, "--rollout-temperature")
    _refuse_other(sampling_params, "top_p", top_p, "--rollout-top-p")
    if top_p == 1:
        _refuse_other(sampling_params, "top_k", -1, "--rollout-top-k")
    return {
        **sampling_params,
        "temperature": args.rollout_temperature,
        "top_p": top_p,
        "logprobs": args.score_centering_top_k + 1 if top_p == 1 else 1,
    }


def _refuse_other(sampling_params: Mapping[str, Any], name: str, expected: Any, flag: str) -> None:
    value = sampling_params.get(name, expected)
    if value != expected:
        raise SettingsError(
            f"A request has {name} {value}, allowed with --use-score-centering: {expected} ({flag}). The trainer "
            "centers all samples of a run with the same distribution.",
            next_step=f"Leave {name} out of the request.",
        )
