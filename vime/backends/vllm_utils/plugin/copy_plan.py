"""Loading a version by copies alone: where each slice of each received tensor goes, known from an earlier load.

vLLM loads a checkpoint tensor by tensor, through Python. What it does is the same for every version of the same model,
so it is recorded once (`copy_recorder`) and repeated in a few calls. A plan is made only where the recording proves
that it comes to the same: copies of received weights, which fill each parameter once, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vime.backends.vllm_utils.plugin.copy_recorder import CopyRecorder, Slice, Write

NamedTensors = Sequence[tuple[str, torch.Tensor]]

_FREE, _CONSTANT, _WEIGHT = 0, 1, 2


class NotCopies(Exception):
    """A load can't be repeated by copies; the text says why."""


@dataclass(frozen=True)
class Copy:
    """One slice of a received tensor, and the part of a parameter that it fills."""

    name: str
    source: Slice
    target: torch.Tensor
    """A view of the parameter."""


@dataclass(frozen=True)
class Arranged:
    """A version whose copies are ready to run: targets and sources of equal shapes."""

    dense: tuple[list[torch.Tensor], list[torch.Tensor]]
    """Those whose layouts are equal and without gaps, which run as one."""
    others: tuple[list[torch.Tensor], list[torch.Tensor]]

    @torch.no_grad()
    def run(self) -> None:
        """Start the copies on the current stream; they may still run when it returns."""
        for targets, sources in (self.dense, self.others):
            if targets:
                torch._foreach_copy_(targets, sources)


class CopyPlan:
    """What a load of one model is made of."""

    def __init__(self, received: NamedTensors, copies: Sequence[Copy]) -> None:
        self._forms = {name: (tensor.dtype, tensor.shape, tensor.device.type) for name, tensor in received}
        self._copies = list(copies)

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    def arrange(self, received: NamedTensors) -> Arranged | None:
        """The copies of another version; None when its tensors aren't those that the plan was made of."""
        tensors = dict(received)
        forms = {name: (tensor.dtype, tensor.shape, tensor.device.type) for name, tensor in received}
        if forms != self._forms or not all(tensor.is_contiguous() for tensor in tensors.values()):
            return None
        dense: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        others: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for copy in self._copies:
            source = _source(copy, tensors[copy.name])
            is_dense = source.is_contiguous() and copy.target.is_contiguous() and source.dtype == copy.target.dtype
            targets, sources = dense if is_dense else others
            targets.append(copy.target)
            sources.append(source)
        return Arranged(dense, others)


@torch.no_grad()
def plan_of(model: torch.nn.Module, received: NamedTensors, recorder: CopyRecorder) -> CopyPlan:
    """The plan of a load that has just ended, in which `received` was loaded into the model.

    Raises:
        NotCopies: it can't be proved that copies do the same.
    """
    if recorder.refusal:
        raise NotCopies(recorder.refusal)
    copies: list[Copy] = []
    for name, parameter in model.named_parameters():
        if parameter.numel() and not any(write.name for write in recorder.writes_to(parameter)):
            raise NotCopies(f"no received weight was seen to go into {name}")
    for name, tensor in _held(model):
        writes = recorder.writes_to(tensor)
        if any(write.name for write in writes):
            _check_filled(name, tensor, writes)
            copies += [_copy(write, tensor) for write in writes if write.source is not None]
    lost = recorder.copied - {copy.name for copy in copies}
    if lost:
        raise NotCopies(f"{min(lost)} went somewhere else than into the model's parameters")
    tensors = dict(received)
    for copy in copies:
        source = _source(copy, tensors[copy.name]).to(copy.target.device, copy.target.dtype)
        if not torch.equal(_bits(copy.target), _bits(source)):
            raise NotCopies(f"the model holds something else than {copy.name}")
    return CopyPlan(received, copies)


def _held(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each storage once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel():
            known = found.setdefault(tensor.untyped_storage().data_ptr(), (name, tensor.data))
            if known[1].nbytes < tensor.nbytes:
                found[tensor.untyped_storage().data_ptr()] = (name, tensor.data)
    return list(found.values())


def _check_filled(name: str, tensor: torch.Tensor, writes: Sequence[Write]) -> None:
    """Each element has one weight, or a constant that no weight was there before or after."""
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    marks = torch.zeros(num_elements, dtype=torch.int8, device=tensor.device)
    for write in writes:
        target = write.target
        if target.dtype != tensor.dtype:
            raise NotCopies(f"{name} is written as {target.dtype}")
        part = marks.as_strided(target.size, target.stride, target.offset)
        if bool((part == _WEIGHT).any()):
            raise NotCopies(f"a part of {name} is written twice")
        part.fill_(_WEIGHT if write.name else _CONSTANT)
    if bool((marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()) == _FREE).any()):
        raise NotCopies(f"a part of {name} is not written")


def _copy(write: Write, tensor: torch.Tensor) -> Copy:
    assert write.source is not None
    target = write.target
    return Copy(write.name, write.source, tensor.as_strided(target.size, target.stride, target.offset))


def _source(copy: Copy, tensor: torch.Tensor) -> torch.Tensor:
    source = copy.source
    return tensor.as_strided(source.size, source.stride, tensor.storage_offset() + source.offset)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
