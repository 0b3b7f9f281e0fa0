"""From flags to the settings of the packer."""

from __future__ import annotations

from pipeline.packing import PackingSettings
from pipeline.preview.batch import microbatch_tokens
from vime.models.work import linear_work
from vime.settings.groups import Settings
from vime.settings.rules.json_files import model_config
from vime.settings.rules.quantities import context_parallel_size, option, size

_INTERLEAVED = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")


def packing_settings(settings: Settings, num_ranks: int) -> PackingSettings:
    """For `num_ranks` data-parallel ranks.

    Raises:
        ModelError: work is to be balanced and the model's config.json doesn't tell its size.
    """
    trainer, context = settings.trainer, context_parallel_size(settings)
    interleaved = any(option(settings.megatron_args, flag) is not None for flag in _INTERLEAVED)
    return PackingSettings(
        num_ranks=num_ranks,
        max_tokens=microbatch_tokens(settings),
        micro_batch_size=trainer.micro_batch_size,
        balance=trainer.balance_data or trainer.balance_by_flops,
        linear_work=linear_work(model_config(settings)) if trainer.balance_by_flops else None,
        count_multiple=size(settings.megatron_args, "--pipeline-model-parallel-size") if interleaved else 1,
        length_multiple=2 * context if context > 1 else 1,
    )
