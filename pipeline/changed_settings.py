"""What it means to go on with a run under other settings: each is accepted or refused, with its consequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from vime.counted import counted
from vime.errors import RestoreError
from vime.settings.groups import Settings, all_flags
from vime.settings.rules.megatron import SAVED_SCHEDULE
from vime.settings.rules.quantities import option

OF_THE_START = frozenset({"load", "save", "ckpt_step", "start_rollout_id"})
"""These say what to start from; they are not settings of the run."""


@dataclass(frozen=True)
class Consequence:
    """What follows from a change of any of these fields.

    `words` are told. Where `refused` holds of the values before and after, and samples wait that it concerns, the
    session doesn't start, and `words` say why.
    """

    fields: tuple[str, ...]
    words: str
    refused: Callable[[Any, Any], bool] | None = None
    before_first_commit: bool = False
    """Refused only where the run starts from its first weights again."""


def _turned_on(before: Any, after: Any) -> bool:
    return not before and bool(after)


def _larger(before: Any, after: Any) -> bool:
    return bool(after > before)


def _always(before: Any, after: Any) -> bool:
    del before, after
    return True


CONSEQUENCES: tuple[Consequence, ...] = (
    Consequence(
        ("hf_checkpoint", "ref_load"),
        "groups that wait were sampled from the first weights of the run, and these would be others",
        _always,
        before_first_commit=True,
    ),
    Consequence(("use_rollout_routing_replay",), "groups that wait were stored without routes", _turned_on),
    Consequence(("use_score_centering",), "groups that wait were stored without candidates", _turned_on),
    Consequence(("score_centering_top_k",), "groups that wait were stored with fewer candidates", _larger),
    Consequence(
        ("rollout_top_p",),
        "groups that wait were stored without the candidates of each token",
        lambda before, after: before == 1.0 != after,
    ),
    Consequence(("hf_checkpoint",), "the weights are those of the commit; model and tokenizer have to be the same"),
    Consequence(("ref_load", "ref_ckpt_step"), "the reference is another, unless the commit has its own"),
    Consequence(
        ("rollout_batch_size", "global_batch_size", "num_steps_per_rollout"),
        "batches have this size from the next one on; groups are not planned again",
    ),
    Consequence(
        ("actor_num_nodes", "actor_num_gpus_per_node"),
        "the checkpoint is spread over the ranks anew; which groups make a batch does not depend on them",
    ),
    Consequence(("num_rollout", "num_epoch"), "the run ends elsewhere"),
    Consequence(("lr",), "the schedule goes on with it from the step that it has reached"),
    Consequence(
        (
            "rollout_temperature",
            "rollout_top_p",
            "rollout_top_k",
            "rollout_max_response_len",
            "rollout_max_context_len",
            "rollout_stop",
            "rollout_stop_token_ids",
        ),
        "groups that wait were sampled under the value before, later ones under the one now",
    ),
    Consequence(
        ("rm_type", "custom_rm_path", "reward_key", "rm_url", "group_rm"),
        "groups that wait keep the rewards they have",
    ),
)
"""The first that fits counts. A field that no row names takes effect from now on."""

_UNUSED_RATE = Consequence(("lr",), f"it is not used, for {SAVED_SCHEDULE} goes on with the commit's")


def consequences(before: Settings, after: Settings, *, num_waiting: int, has_commit: bool) -> list[str]:
    """Words about each setting that differs from those that the run had.

    `num_waiting` groups have samples already.

    Raises:
        RestoreError: a change that the samples of those groups don't allow; all such changes are named.
    """
    told, refused, others = [], [], []
    for field, (group, described) in all_flags().items():
        value_of = attrgetter(f"{group}.{field}")  # of a record from before there was this flag, its default
        was, now = value_of(before), value_of(after)
        if was == now or field in OF_THE_START:
            continue
        change = described.name if described.secret else f"{described.name} is {_shown(now)}, was {_shown(was)}"
        row = _row(field, was, now, num_waiting, has_commit)
        if field == "lr" and has_commit and option(after.megatron_args, SAVED_SCHEDULE) is not None:
            row = _UNUSED_RATE
        if row is None:
            others.append(described.name)
        elif row.refused is not None:
            refused.append(f"{change}: {row.words}")
        else:
            told.append(f"{change}: {row.words}.")
    if refused:
        raise RestoreError(
            f"{counted(num_waiting, 'group')} with samples wait, which don't allow this. {'; '.join(refused)}.",
            next_step="Give the old values, or start a new run in another --save.",
        )
    if before.megatron_args != after.megatron_args:
        others.append("what is passed on to Megatron")
    if before.vllm_args != after.vllm_args:
        others.append("what is passed on to the engines")
    if others:
        told.append(f"Changed since the last session, and in effect from now on: {', '.join(others)}.")
    return told


def _row(field: str, was: Any, now: Any, num_waiting: int, has_commit: bool) -> Consequence | None:
    for row in CONSEQUENCES:
        if field not in row.fields:
            continue
        if row.refused is None:
            return row
        concerned = num_waiting > 0 and not (row.before_first_commit and has_commit)
        if concerned and row.refused(was, now):
            return row
    return None


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value)) or "empty"
    return "left out" if value is None else str(value)
