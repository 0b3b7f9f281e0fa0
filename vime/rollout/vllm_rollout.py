"""Stock generation: of a sample, for generate functions of the user's own, and of a rollout."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from vime.errors import SampleError
from vime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from vime.rollout.collected_output import as_output
from vime.rollout.evaluation_call import current_evaluation
from vime.rollout.model_url import get_model_url as get_model_url
from vime.rollout.rollout_call import current_rollout
from vime.rollout.sample_call import SampleCall, current_call
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample


async def generate(args: Any, sample: Sample, sampling_params: Mapping[str, Any] | None = None) -> Sample:  # noqa: ARG001
    """Have an engine of the run say what comes after `sample.tokens`, or after its prompt where there are none yet.

    The tokens are appended with their log-probabilities, policy versions and whatever else training needs of them, and
    `response`, `response_length`, `loss_mask` and `status` follow. When the request was aborted, the status is ABORTED:
    return the sample then. `sampling_params` are those that the generate function got, or some of them changed.

    Raises:
        SampleError: the sample is finished and nothing was appended since, or a parameter can't be changed.
        EngineError: the engine failed or could not be reached.
    """
    call, sampling = _asked(sample, sampling_params)
    await call.continue_sample(sample, sampling)
    return sample


async def generate_in_pieces(
    args: Any,  # noqa: ARG001
    sample: Sample,
    sampling_params: Mapping[str, Any] | None = None,
) -> AsyncGenerator[Sample]:
    """As `generate`, while the engine samples: yields the sample each time some tokens were appended.

    The last one that it yields is finished, or ABORTED. Leaving the loop ends the request; the sample keeps what it
    has, and the function that leaves sets its status, or appends what comes next. A piece has about 16 tokens.

    Raises:
        SampleError: as `generate`, and where training needs candidates, nuclei or routes of each token.
        EngineError: the engine failed; the sample has what came until then.
    """
    call, sampling = _asked(sample, sampling_params)
    async with contextlib.aclosing(call.continue_in_pieces(sample, sampling)) as pieces:
        async for piece in pieces:
            yield piece


async def generate_streaming(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
    """For --custom-generate-function-path: vime's own generation, whose tokens are here before the last one is.

    So with --partial-rollout and --use-fault-tolerance a sample goes on after what an engine had said before it failed.
    """
    async for _ in generate_in_pieces(args, sample, sampling_params):
        pass
    return sample


def _asked(sample: Sample, sampling_params: Mapping[str, Any] | None) -> tuple[SampleCall, SamplingSettings]:
    """The running call, and how to sample in it. Raises `SampleError`."""
    call = current_call()
    sampling = call.sampling.changed(sampling_params or {}, evaluation=call.evaluation)
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED) and not _ends_with_others_tokens(sample):
        raise SampleError(
            f"sample {sample.index} of group {sample.group_index}: its status is {sample.status.value}, allowed: "
            "pending or aborted.",
            next_step="Append what the environment said before asking for more.",
            reason="status",
        )
    return call, sampling


def _ends_with_others_tokens(sample: Sample) -> bool:
    """Whether the last token is a tool's or an environment's."""
    return bool(sample.response_length and sample.loss_mask and not sample.loss_mask[-1])


def generate_rollout(
    args: Any,
    rollout_id: int,  # noqa: ARG001 - the documented signature
    data_source: Any,
    evaluation: bool = False,
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """`args.rollout_batch_size` groups that the dynamic filter keeps, in the order of their samples.

    `args.over_sampling_batch_size` groups are begun at a time while those in work could not fill the rollout; what is
    left over at its end comes first in the next. Fewer groups at the end of the prompts. For an `evaluation` the
    results of vime's own, of every data set of the run.
    """
    if evaluation:
        return current_evaluation().run()
    call, size = current_rollout(), args.rollout_batch_size
    collected = call.run(call.collector.collect(data_source, size, pull=args.over_sampling_batch_size or size))
    return as_output(args, collected, data_source)
