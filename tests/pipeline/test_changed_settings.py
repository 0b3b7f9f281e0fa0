"""Each changed setting is accepted or refused, with its consequence."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest

from pipeline.changed_settings import CONSEQUENCES, OF_THE_START, consequences
from vime.errors import RestoreError
from vime.settings.groups import Settings, all_flags
from vime.settings.parse import parse_settings


def settings(*words: str) -> Settings:
    return parse_settings(["--save", "/run", "--rollout-batch-size", "8", *words])


def told(*words: str, before: tuple[str, ...] = (), num_waiting: int = 5, has_commit: bool = True) -> str:
    found = consequences(settings(*before), settings(*words), num_waiting=num_waiting, has_commit=has_commit)
    return "\n".join(found)


def test_nothing_is_said_where_nothing_has_changed_or_only_where_to_start() -> None:
    assert told() == ""
    assert told("--load", "/run", "--ckpt-step", "3") == ""


@pytest.mark.parametrize(
    ("words", "consequence"),
    [
        (("--rollout-batch-size", "4"), "--rollout-batch-size is 4, was 8: batches have this size from the next one"),
        (("--actor-num-gpus-per-node", "2"), "spread over the ranks anew"),
        (("--rollout-temperature", "0.5"), "groups that wait were sampled under the value before"),
        (("--lr", "0.5"), "--lr is 0.5, was 1e-06: the schedule goes on with it from the step that it has reached."),
        (("--lr", "0.5", "--use-checkpoint-opt_param-scheduler"), "--lr is 0.5, was 1e-06: it is not used"),
        (("--rm-type", "math"), "groups that wait keep the rewards they have"),
        (("--hf-checkpoint", "/other"), "the weights are those of the commit"),
        (("--eps-clip", "0.1"), "Changed since the last session, and in effect from now on: --eps-clip."),
        (("--tensor-model-parallel-size", "2"), "what is passed on to Megatron"),
    ],
)
def test_an_accepted_change_is_told_with_its_consequence(words: tuple[str, ...], consequence: str) -> None:
    assert consequence in told(*words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--use-rollout-routing-replay",), "stored without routes"),
        (("--use-score-centering",), "stored without candidates"),
        (("--rollout-top-p", "0.9"), "without the candidates of each token"),
    ],
)
def test_what_waiting_samples_lack_is_refused_until_none_waits(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(RestoreError, match=f"5 groups with samples wait.*{reason}") as caught:
        told(*words)
    assert "another --save" in caught.value.next_step
    assert reason not in told(*words, num_waiting=0)


def test_a_larger_head_is_refused_and_a_smaller_one_is_not() -> None:
    head = ("--use-score-centering", "--score-centering-top-k")
    with pytest.raises(RestoreError, match="stored with fewer candidates"):
        told(*head, "64", before=(*head, "32"))
    told(*head, "16", before=(*head, "32"))


def test_other_first_weights_are_refused_before_the_first_commit_and_accepted_after_it() -> None:
    with pytest.raises(RestoreError, match="--hf-checkpoint is /other, was left out: groups that wait were sampled"):
        told("--hf-checkpoint", "/other", has_commit=False)
    told("--hf-checkpoint", "/other", has_commit=True)
    told("--hf-checkpoint", "/other", has_commit=False, num_waiting=0)


def test_all_refused_changes_come_in_one_message() -> None:
    with pytest.raises(RestoreError, match=r"(?s)--use-score-centering.*--use-rollout-routing-replay"):
        told("--use-score-centering", "--use-rollout-routing-replay")


def test_a_setting_that_the_record_of_the_run_lacks_counts_as_its_default() -> None:
    record = dataclasses.asdict(settings())
    del record["checkpoint"]["keep_checkpoints"]
    before = msgspec.json.decode(json.dumps(record), type=Settings)
    assert consequences(before, settings(), num_waiting=5, has_commit=True) == []
    (words,) = consequences(before, settings("--keep-checkpoints", "2"), num_waiting=5, has_commit=True)
    assert "--keep-checkpoints" in words


def test_every_row_names_fields_that_exist() -> None:
    named = {field for row in CONSEQUENCES for field in row.fields} | OF_THE_START
    assert named <= set(all_flags())
