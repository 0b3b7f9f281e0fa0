"""What a request may ask for, and an answer that was cut short."""

from __future__ import annotations

import numpy as np
import pytest

from vime.backends.vllm_utils.plugin.columns import OPTION, ColumnRequest, Columns, Nuclei, column_request


class Parameters:
    def __init__(self, extra_args: dict[str, object] | None) -> None:
        self.extra_args = extra_args


def test_an_answer_that_was_cut_short_loses_the_same_tokens_of_every_column() -> None:
    numbers = np.arange(20, dtype=np.int32)
    whole = Columns(
        sampled_ids=numbers[:10],
        log_probs=-numbers[:10].astype(np.float32),
        candidate_ids=numbers.reshape(10, 2),
        candidate_log_probs=-numbers.reshape(10, 2).astype(np.float32),
        routes=np.arange(13 * 2 * 3, dtype=np.uint8).reshape(13, 2, 3),  # 4 prompt tokens
        nuclei=Nuclei(numbers, np.arange(0, 22, 2), -numbers.astype(np.float32)),
        versions=[("1", 10)],
    )
    cut = whole.head(7)
    assert len(cut) == len(cut.log_probs) == len(cut.candidate_ids) == len(cut.candidate_log_probs) == 7
    assert cut.nuclei is not None
    assert len(cut.nuclei.offsets) == 8
    assert cut.nuclei.offsets[-1] == len(cut.nuclei.ids) == len(cut.nuclei.log_probs) == 14
    assert cut.routes is not None
    assert whole.routes is not None
    np.testing.assert_array_equal(cut.routes, whole.routes[:10])


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}])
def test_only_requests_that_ask_get_columns(extra: dict[str, object] | None) -> None:
    assert column_request(Parameters(extra)) is None
    assert column_request(None) is None
    assert column_request(Parameters({OPTION: {"num_candidates": 3}})) == ColumnRequest(num_candidates=3)
