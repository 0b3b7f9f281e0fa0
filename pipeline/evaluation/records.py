"""What an evaluation leaves behind: a line of `metrics.jsonl`, and a file with a line for each answer."""

from __future__ import annotations

from typing import Any

import msgspec


class EvalAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `evaluations/<step>.jsonl`: one answer to one prompt."""

    data_set: str
    prompt_number: int
    """Of the prompt in its data set, from 0."""
    attempt: int
    """Of the answer among those to the same prompt, from 0."""
    source: str
    """File and line of the prompt."""
    prompt: str | list[dict[str, Any]]
    label: Any
    response: str
    reward: float | None
    """None for an answer that failed: it is neither right nor wrong."""
    details: dict[str, Any] | None = None
    """The whole reward, where it is a dict."""
    status: str
    prompt_tokens: int
    response_tokens: int
    policy_versions: list[int]
    """Those that made tokens of the response, ascending."""
    metadata: dict[str, Any]
    failure: str = ""
    """Why it failed, in a word; empty when it didn't."""
    error: str = ""


class DataSetResult(msgspec.Struct, frozen=True):
    """One data set in one evaluation."""

    name: str
    """As `--eval-prompt-data` or `--eval-config` calls it."""
    prompts: int
    """Prompts that were asked."""
    answers: int
    """Answers to all of them, failed ones included."""
    failed: dict[str, int]
    """Reason -> answers that failed; they count in no other number."""
    policy_version: int | None
    """The one version that made every answer; None when several did, or none is known."""
    policy_versions: list[int]
    """All that made one, ascending."""


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `metrics.jsonl`: one evaluation. Lines of rollout batches have no `evaluation`."""

    evaluation: int
    """Rollout batches that were trained before: 0 before training."""
    branch: str
    """The session that evaluated."""
    time_s: float
    """Unix time at its end."""
    generate_s: float
    """Seconds until every response was there."""
    seconds: float
    """Seconds until every reward was there, too."""
    policy_version: int | None
    """The one version that made every answer; None when several did, or none is known."""
    policy_versions: list[int]
    """All that made one, ascending."""
    metrics: dict[str, float]
    """`eval/NAME` and more."""
    data_sets: list[DataSetResult]
    """What each data set consisted of; see below."""
    answers_file: str = ""
    """Relative to the run folder."""
    problem: str = ""
    """Why there is no result."""
    warnings: list[str] = []
    """What else is to be told, a sentence each."""
    is_reported: bool = False
    """The user's own function has reported it."""


class _Kind(msgspec.Struct):
    evaluation: int | None = None


def read_evaluations(metrics: bytes) -> list[EvaluationRecord]:
    """The evaluations among the lines of `metrics.jsonl`; a line that a kill cut short is left out."""
    found = []
    for line in metrics.splitlines():
        try:
            if msgspec.json.decode(line, type=_Kind).evaluation is not None:
                found.append(msgspec.json.decode(line, type=EvaluationRecord))
        except msgspec.MsgspecError:
            continue
    return found
