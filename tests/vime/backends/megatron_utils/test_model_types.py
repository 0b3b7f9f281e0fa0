"""Which families of models are described, mapped and run."""

from vime.backends.megatron_utils.hf_config import MAPPED_MODEL_TYPES
from vime.models.families import FAMILIES, SUPPORTED_MODEL_TYPES


def test_what_is_run_can_be_mapped_and_what_is_mapped_has_a_shape() -> None:
    assert set(SUPPORTED_MODEL_TYPES) <= set(MAPPED_MODEL_TYPES) <= set(FAMILIES)
