"""Watches vLLM load a version, and notes which slice of which received tensor went where.

It sees every tensor operation of the load. What is more than a copy of received weights, or can't be followed, is a
reason why the load can't be repeated by copies alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPY = torch.ops.aten.copy_.default
_ESCAPES = frozenset({"numpy", "data_ptr", "tolist", "__array__", "__dlpack__"})
"""Methods that let others read a tensor's memory."""
_TORCH_OPS = frozenset({"aten", "prim", "prims"})
_OVERWRITES = frozenset({torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default})


@dataclass(frozen=True)
class Slice:
    """Elements of a storage or tensor: the first one's place, and sizes and strides, in elements of `dtype`."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Slice:
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def moved(self, by: int) -> Slice:
        return Slice(self.offset + by, self.size, self.stride, self.dtype)


@dataclass(frozen=True)
class Write:
    """What was written to a slice of a storage: a slice of the received tensor `name`; without a name a constant."""

    target: Slice
    name: str = ""
    source: Slice | None = None


@dataclass(frozen=True)
class _Received:
    start: int
    """Byte of the storage."""
    name: str
    tensor: torch.Tensor


class CopyRecorder(TorchDispatchMode):
    """Enter it around one whole load of `received`, contiguous tensors that are kept until it ends."""

    def __init__(self, received: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal = ""
        """Why the load is more than copies; empty when it isn't."""
        self.copied: set[str] = set()
        """Received tensors of which something was copied."""
        self._calls = _Calls(self._called)
        self._received: dict[int, list[_Received]] = {}
        self._writes: dict[int, list[Write]] = {}
        for name, tensor in received:
            if not tensor.is_contiguous():
                self._refuse(f"{name} is not contiguous")
            start = int(tensor.storage_offset()) * tensor.element_size()
            self._received.setdefault(_key(tensor), []).append(_Received(start, name, tensor))
        for tensors in self._received.values():
            tensors.sort(key=lambda each: each.start)

    def __enter__(self) -> Self:
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)  # type: ignore[no-untyped-call]
        self._calls.__exit__(kind, error, tb)  # type: ignore[no-untyped-call]

    def writes_to(self, tensor: torch.Tensor) -> list[Write]:
        """What was written to the tensor's storage, in order."""
        return self._writes.get(_key(tensor), [])

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.refusal:
            self._follow(func, args, kwargs, result)
        return result

    def _called(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Operations of others may be seen here alone, and what they do with a tensor's memory nowhere."""
        name = str(getattr(func, "_qualified_op_name", "") or getattr(func, "__name__", ""))
        namespace = getattr(func, "namespace", None) or (name.split("::")[0] if "::" in name else None)
        is_foreign = namespace is not None and namespace not in _TORCH_OPS
        if (is_foreign or name in _ESCAPES) and any(self._is_tracked(each) for each in _tensors((args, kwargs))):
            self._refuse(f"{name} reads weights")

    def _follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if func is _COPY:
            self._copied(args[0], args[1])
            return
        if func.is_view:
            return
        inputs = _tensors((args, kwargs))
        written = _written(func, args, kwargs)
        read = [tensor for tensor in inputs if not any(tensor is other for other in written)]
        if func not in _OVERWRITES:
            read += written
        if any(self._is_tracked(tensor) for tensor in read):
            self._refuse(f"{func} computes with weights")
            return
        for tensor in written:
            self._writes.setdefault(_key(tensor), []).append(Write(Slice.of(tensor)))
        known = {_key(tensor) for tensor in inputs}
        for tensor in _tensors(result):
            if _key(tensor) not in known:  # new memory, at whatever address
                self._writes.pop(_key(tensor), None)

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.is_meta:
            return
        if not (_is_plain(target) and _is_plain(source)):
            if any(self._is_tracked(each) for each in (target, source)):
                self._refuse("weights change their layout")
            return
        key = _key(target)
        if key in self._received:
            self._refuse("received weights are changed")
        elif _key(source) in self._received:
            self._writes.setdefault(key, []).append(self._from_received(target, source))
        elif self._has_weights(source):
            self._passed_on(target, source)
        else:
            self._writes.setdefault(key, []).append(Write(Slice.of(target)))

    def _from_received(self, target: torch.Tensor, source: torch.Tensor) -> Write:
        byte = int(source.storage_offset()) * source.element_size()
        candidates = self._received[_key(source)]
        found = candidates[max(0, bisect.bisect_right(candidates, byte, key=lambda each: each.start) - 1)]
        if found.tensor.dtype != source.dtype or target.shape != source.shape:
            self._refuse(f"{found.name} is taken as {source.dtype} {list(source.shape)}")
        self.copied.add(found.name)
        first = (byte - found.start) // source.element_size()
        return Write(Slice.of(target), found.name, Slice.of(source).moved(first - int(source.storage_offset())))

    def _passed_on(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A tensor that was put together of weights goes whole to where the model keeps it."""
        key, origin = _key(target), _key(source)
        if key == origin and Slice.of(target) == Slice.of(source):
            return
        is_whole = source.untyped_storage().nbytes() == source.nbytes and source.is_contiguous()
        if not is_whole or key == origin or (target.shape, target.stride()) != (source.shape, source.stride()):
            self._refuse("weights are put together in more than one step")
        elif target.dtype != source.dtype:
            self._refuse("weights are converted after they are put together")
        else:
            moved = [
                Write(write.target.moved(int(target.storage_offset())), write.name, write.source)
                for write in self._writes[origin]
            ]
            self._writes.setdefault(key, []).extend(moved)

    def _is_tracked(self, tensor: torch.Tensor) -> bool:
        return _is_plain(tensor) and (_key(tensor) in self._received or self._has_weights(tensor))

    def _has_weights(self, tensor: torch.Tensor) -> bool:
        return any(write.name for write in self._writes.get(_key(tensor), ()))

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason


class _Calls(TorchFunctionMode):
    """Tells of each call of a function of torch before it is made."""

    def __init__(self, tell: Callable[[Any, Sequence[Any], dict[str, Any]], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._tell(func, args, kwargs)
        return func(*args, **kwargs)


def _key(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and _is_plain(value)]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has memory that sizes and strides describe."""
    return tensor.layout is torch.strided and not tensor.is_meta


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Arguments that an operation changes."""
    schema = func._schema.arguments
    named = [*zip(schema, args, strict=False), *((each, kwargs[each.name]) for each in schema if each.name in kwargs)]
    return _tensors([value for each, value in named if each.alias_info is not None and each.alias_info.is_write])
