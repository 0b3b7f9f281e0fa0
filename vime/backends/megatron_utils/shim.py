"""Make Megatron-Core 0.19.2 importable and trainable where it assumes CUDA, Triton or Apex.

Megatron asks CUDA for the current device, streams, events and random state in some hundred places. Without a
GPU those questions get CPU answers here, once per process and before the first Megatron import. With a GPU only
the repairs that have nothing to do with CUDA are applied: `typing.override` on Python 3.11, and two faults of the
distributed optimizer when torch's own Adam is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import typing_extensions

_FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange", "rand", "randn")
_LIKE_FACTORIES = ("empty_like", "zeros_like", "ones_like")
_PAGED_STASH = "megatron.core.transformer.moe.ops.paged_stash"


@functools.cache
def prepare_megatron() -> None:
    """Apply the repairs; to be called before any import of Megatron. A second call does nothing."""
    warnings.filterwarnings("ignore", message=".*(Apex|absl|TransformerEngine|Transformer Engine|transformer-engine).*")
    # Megatron reports every choice at INFO, and warns about the successors of what is used here on purpose.
    logging.getLogger("megatron").setLevel(logging.WARNING)
    for name in (
        "dist_checkpointing.strategies.torch",
        "models.gpt.gpt_model",
        "distributed.distributed_data_parallel",
    ):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
    if "override" not in typing.__dict__:
        typing.override = typing_extensions.override  # type: ignore[attr-defined,assignment,unused-ignore]
    # Megatron's own check for TP and CP before Blackwell: one hardware queue keeps collectives in order.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not torch.cuda.is_available():
        _stub_triton_kernels()
        _answer_cuda_calls_with_cpu()
    import megatron.core  # noqa: F401

    if not torch.cuda.is_available():
        _fork_cpu_generator()
        _keep_splits_as_lists()
        _exchange_uneven_parts_padded()
    else:
        _take_many_tensors_at_once()
    _load_torch_adam_without_step()


def _stub_triton_kernels() -> None:
    """Replace the one module that imports Triton unguarded; its kernels only serve an option that needs a GPU.

    A fake `triton` package would be found by `torch._inductor`, which then fails.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    module = types.ModuleType(_PAGED_STASH)
    module.__dict__.update(GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=None, paged_stash_pop_kernel=None)
    sys.modules[_PAGED_STASH] = module


class _TensorTypeName(str):
    """`torch.FloatTensor` that also equals `torch.cuda.FloatTensor`: Megatron's optimizers compare these names."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        cuda_name = str(self).replace("torch.", "torch.cuda.", 1)
        return str.__eq__(self, other) is True or (isinstance(other, str) and cuda_name == str(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class _NoStream:
    """Stands in for CUDA streams and events on a machine that has neither."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any, **__: Any) -> _NoStream:
        return _NoStream()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make_no_op()

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    __hash__ = object.__hash__


def _make_no_op() -> Callable[..., None]:
    """A new function each time: dynamo refuses one object under several names."""

    def no_op(*_: Any, **__: Any) -> None:
        return None

    return no_op


def _without_cuda(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory so that a literal `device="cuda"` or pinned memory means ordinary memory."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_cpu


def _answer_cuda_calls_with_cpu() -> None:
    # Dynamo tabulates torch's functions when imported, so it has to see the originals; compiling Megatron's small
    # fused functions for a CPU takes minutes of g++ and gains nothing.
    import torch._dynamo

    torch._dynamo.config.disable = True
    # `with torch.device(...)` remembers the factories that it redirects at its first use; it must know the originals,
    # or models built on the meta device (transformers' `from_pretrained`) keep uninitialised buffers.
    torch.utils._device._device_constructors()
    cpu = torch.device("cpu")
    generator = torch.default_generator
    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu
    for name in ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, _make_no_op())
    cuda.manual_seed = lambda seed: generator.manual_seed(int(seed))
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: generator.get_state()  # noqa: ARG005
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: generator.set_state(state)  # noqa: ARG005
    cuda.get_device_properties = lambda device=None: types.SimpleNamespace(major=8, minor=0, name="cpu")  # noqa: ARG005
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _NoStream()
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, _make_no_op())
    for name in _FACTORIES + _LIKE_FACTORIES:
        setattr(torch, name, _without_cuda(getattr(torch, name)))

    tensor_class: Any = torch.Tensor
    module_class: Any = torch.nn.Module
    tensor_class.cuda = module_class.cuda = lambda self, *_, **__: self
    tensor_class.record_stream = _make_no_op()
    tensor_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = tensor_type(self, *args, **kwargs)
        return _TensorTypeName(result) if isinstance(result, str) else result

    tensor_class.type = type_name


def _fork_cpu_generator() -> None:
    """Let Megatron's random state tracker switch the CPU generator.

    Unrepaired, its CUDA calls are queued for a device that never appears and dropout or recomputation silently
    use the wrong state.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    @contextlib.contextmanager
    def fork(self: Any, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"random state {name} was not added to the tracker")
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)

    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    megatron_random.CudaRNGStatesTracker.fork = fork


def _keep_splits_as_lists() -> None:
    """gloo's all-to-all needs its split sizes as plain numbers; Megatron only converts CUDA tensors."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
        return value.numpy() if as_numpy and isinstance(value, torch.Tensor) else value

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _exchange_uneven_parts_padded() -> None:
    """gloo gathers and scatters equal parts only; experts that are cut over ranks exchange as many rows as came."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def padded(part: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])

    def gather_parts(
        part: torch.Tensor, group: Any, sizes: list[int] | None = None, in_global_buffer: bool = False
    ) -> Any:
        if sizes is None or group.size() == 1:
            return gather(part, group, sizes, in_global_buffer)
        rows = max(1, *sizes)
        parts = gather(padded(part, rows), group).split(rows)
        return torch.cat([each[:size] for each, size in zip(parts, sizes, strict=True)])

    def reduce_scatter_parts(
        whole: torch.Tensor, group: Any, sizes: list[int] | None = None, in_global_buffer: bool = False
    ) -> Any:
        if sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, sizes, in_global_buffer)
        rows = max(1, *sizes)
        parts = torch.cat([padded(part, rows) for part in torch.split(whole, sizes)])
        return reduce_scatter(parts, group)[: sizes[group.rank()]]

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = reduce_scatter_parts


def _take_many_tensors_at_once() -> None:
    """Megatron without Apex measures, scales and copies gradients tensor by tensor, and waits for each norm."""
    from megatron.core.optimizer import clip_grads, optimizer

    clip_grads.l2_norm_impl = norm_of_all
    clip_grads.multi_tensor_scale_impl = optimizer.multi_tensor_scale_impl = scale_all
    optimizer._multi_tensor_copy_this_to_that = copy_all


def norm_of_all(_size: int, _overflow: torch.Tensor, lists: list[list[torch.Tensor]], *_: Any) -> tuple[Any, None]:
    """Apex's norm: that of all numbers of the tensors in the one list [1]; none of single tensors."""
    return torch.stack(torch._foreach_norm(lists[0])).norm()[None], None


def scale_all(_size: int, _overflow: torch.Tensor, lists: list[list[torch.Tensor]], scale: float) -> None:
    """Apex's scaling: what is in the tensors of the first list, times `scale`, into those of the second."""
    sources, targets = lists
    if any(source is not target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, scale)


def copy_all(this: list[torch.Tensor], that: list[torch.Tensor], overflow_buf: torch.Tensor | None = None) -> None:  # noqa: ARG001
    """Copy the tensors of one list into those of another, of any dtypes."""
    if this:
        torch._foreach_copy_(that, this)


def _load_torch_adam_without_step() -> None:
    """torch's Adam keeps `step` per parameter; the fully reshardable loader drops it and then looks it up."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> Any:
        return original(self, model_param, {"step": None, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
