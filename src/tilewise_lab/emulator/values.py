"""What a kernel's variables hold, on torch tensors: integers, values in registers, pointers, TMA descriptors, shared
memory and mbarriers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .machine import Barrier, Shared, current


class Int(int):
    """A scalar of a kernel: division truncates, as in C."""

    def __floordiv__(self, other: int) -> Int:
        quotient = abs(int(self)) // abs(int(other))
        return Int(quotient if (self < 0) == (other < 0) else -quotient)

    def __rfloordiv__(self, other: int) -> Int:
        return Int(other) // self

    def __mod__(self, other: int) -> Int:
        return Int(int(self) - int(other) * int(self // other))

    def __rmod__(self, other: int) -> Int:
        return Int(other) % self

    def to(self, _dtype: Any) -> Int:
        return self


def _int_operator(name: str) -> Callable[[int, Any], Any]:
    plain = getattr(int, name)

    def apply(a: int, b: Any) -> Any:
        result = plain(a, b)
        return Int(result) if isinstance(result, int) and not isinstance(result, bool) else result

    return apply


for _name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift"):
    for _side in ("", "r"):
        setattr(Int, f"__{_side}{_name}__", _int_operator(f"__{_side}{_name}__"))


class Value:
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)

    def __init__(self, data: Tensor, kind: str = "alu") -> None:
        self.data = data
        current().charge(kind, data.numel())

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def to(self, dtype: torch.dtype) -> Value:
        return Value(self.data.to(dtype))

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Value:
        return Value(self.data.permute(order))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index])

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __bool__(self) -> bool:
        """Of a scalar, as a branch needs it. A branch that each lane takes by itself is taken if any lane takes it."""
        return bool(self.data.any())

    __hash__ = None  # type: ignore[assignment]


def _value_operator(f: Callable[[Any, Any], Any], swap: bool) -> Callable[[Value, Any], Value]:
    def apply(a: Value, b: Any) -> Value:
        x, y = a.data, raw(b)
        return Value(f(y, x) if swap else f(x, y))

    return apply


def _truncated(a: Any, b: Any) -> Tensor:
    return torch.div(torch.as_tensor(a), torch.as_tensor(b), rounding_mode="trunc")


OPERATORS = {name: getattr(operator, f"__{name}__") for name in ("add", "sub", "mul", "truediv", "and", "or", "xor")}
OPERATORS |= {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
OPERATORS |= {"floordiv": _truncated, "mod": lambda a, b: torch.fmod(torch.as_tensor(a), torch.as_tensor(b))}
for _name, _f in OPERATORS.items():
    setattr(Value, f"__{_name}__", _value_operator(_f, False))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__r{_name}__", _value_operator(_f, True))


def raw(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


def tensor(x: Any) -> Tensor:
    return x.data if isinstance(x, Value) else torch.as_tensor(x, dtype=torch.float32 if isinstance(x, float) else None)


class Pointer:
    """Addresses into a tensor's storage, in elements: one, or one per element of a value."""

    def __init__(self, base: Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, offset
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    def __add__(self, n: Any) -> Pointer:
        a, b = raw(self.offset), raw(n)
        return Pointer(self.base, Value(a + b) if isinstance(a + b, Tensor) else a + b)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.base, Value(raw(self.offset)[index]))

    def to(self, _dtype: Any) -> Int:
        """The address as a number, which `cast` takes back."""
        address = self.base.data_ptr() + int(self.offset) * self.base.element_size()
        current().machine.addresses.append(self.base)
        return Int(address)

    def memory(self) -> Tensor:
        elements = self.base.untyped_storage().nbytes() // self.base.element_size()
        flat: Tensor = torch.as_strided(self.base, (int(elements),), (1,), 0)
        return flat

    def index(self) -> Tensor:
        return torch.as_tensor(raw(self.offset)).long() + int(self.base.storage_offset())


def cast(x: Any, dtype: Any) -> Any:
    if isinstance(dtype, torch.dtype):
        if isinstance(x, Value):
            return x.to(dtype)
        return float(x) if dtype.is_floating_point else Int(x)
    for base in current().machine.addresses:
        start = base.untyped_storage().data_ptr()
        if base.dtype == dtype.element_ty and start <= x < start + max(1, base.untyped_storage().nbytes()):
            return Pointer(base, Int((x - base.data_ptr()) // base.element_size()))
    raise IndexError(f"no tensor of {dtype.element_ty} at address {x}")


class PointerType(NamedTuple):
    element_ty: torch.dtype


def load(pointer: Pointer, mask: Any = None, other: Any = 0, volatile: bool = False) -> Any:
    index = pointer.index()
    if mask is None:
        found = pointer.memory()[index]
    else:
        keep = torch.as_tensor(raw(mask)).expand(index.shape)
        found = torch.full(index.shape, other, dtype=pointer.base.dtype)
        found[keep] = pointer.memory()[index[keep]]
    current().step()
    return Int(found) if index.dim() == 0 and not found.is_floating_point() else Value(found, "shared")


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    index = pointer.index()
    content = torch.as_tensor(raw(value), dtype=pointer.base.dtype).expand(index.shape)
    keep = torch.ones(index.shape, dtype=torch.bool) if mask is None else torch.as_tensor(raw(mask)).expand(index.shape)
    current().step()
    pointer.memory()[index[keep]] = content[keep]


def atomic_add(pointer: Pointer, value: Any, sem: str = "") -> Any:
    current().step()
    index = pointer.index()
    old = pointer.memory()[index].clone()
    pointer.memory().index_put_((index,), torch.as_tensor(raw(value), dtype=old.dtype), accumulate=True)
    return Value(old) if index.dim() else Int(old)


def atomic_max(pointer: Pointer, value: Any, sem: str = "") -> None:
    current().step()
    pointer.memory().scatter_reduce_(0, pointer.index().flatten(), torch.as_tensor(raw(value)).flatten(), "amax")


class Descriptor:
    """A TMA descriptor: axes with sizes and strides over a tensor, and a box. Addresses wrap at 2^64 bytes."""

    def __init__(self, name: str, host: Any) -> None:
        self.name, self.base = name, host.base
        self.shape, self.strides, self.box = list(host.shape), list(host.strides), list(host.block_shape)
        self.dtype, self.layout = host.base.dtype, None
        size = host.base.element_size()
        self.wrap = 2**64 // size
        self.block_type = SimpleNamespace(shape=self.box, nbytes=size * torch.Size(self.box).numel())

    def locate(self, where: list[int]) -> tuple[Tensor, Tensor]:
        """The address of every element of the box at `where`, and which of them lie inside."""
        inside, address = torch.ones((), dtype=torch.bool), torch.zeros((), dtype=torch.long)
        for axis, (at, n, size, stride) in enumerate(zip(where, self.box, self.shape, self.strides, strict=True)):
            shape = [-1 if a == axis else 1 for a in range(len(self.box))]
            places = [int(at) + x for x in range(n)]
            inside = inside & torch.tensor([0 <= x < size for x in places]).view(shape)
            address = address + torch.tensor([_signed(x * stride % self.wrap, self.wrap) for x in places]).view(shape)
        return address + self.base.storage_offset(), inside

    def read(self, where: list[int]) -> Tensor:
        address, inside = self.locate(where)
        box = torch.zeros(self.box, dtype=self.dtype)
        box[inside] = Pointer(self.base).memory()[address[inside]]
        return box

    def write(self, where: list[int], tile: Tensor) -> None:
        address, inside = self.locate(where)
        Pointer(self.base).memory()[address[inside]] = tile.view(self.box)[inside]

    def add(self, where: list[int], tile: Tensor) -> None:
        self.write(where, self.read(where) + tile.view(self.box))


def _signed(x: int, wrap: int) -> int:
    return x - wrap if x >= wrap // 2 else x


class Memory:
    """What `allocate_shared_memory` returns, and its views."""

    type = SimpleNamespace(layout=None)

    def __init__(self, shared: Shared) -> None:
        self.shared = shared

    @property
    def shape(self) -> list[int]:
        return list(self.shared.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.shared.data.dtype

    def index(self, n: int) -> Memory:
        if not 0 <= n < self.shape[0]:
            raise IndexError(f"{self.shared.name}[{n}] of {self.shape[0]}")
        return Memory(self.shared.view(lambda x: x[int(n)], f"[{n}]"))

    def reshape(self, shape: list[int]) -> Memory:
        *outer, inner = shape
        columns = self.shape[-1]
        return Memory(self.shared.view(lambda x: x.view([*outer, inner * x.shape[-1] // columns])))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.shared.view(lambda x: x.permute(order)))

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return Memory(self.shared.view(lambda x: x.narrow(dim, int(start), int(length))))

    def load(self, _layout: Any = None) -> Value:
        return Value(self.shared.load())

    def store(self, value: Value) -> None:
        self.shared.store(value.data)


class Barriers:
    def __init__(self, name: str, n: int) -> None:
        self.bars = [Barrier(f"{name}[{i}]") for i in range(n)]

    def index(self, n: int) -> Barrier:
        if not 0 <= n < len(self.bars):
            raise IndexError(f"barrier {n} of {len(self.bars)}")
        return self.bars[n]


def allocate_shared_memory(dtype: torch.dtype, shape: list[int], layout: Any = None) -> Memory | Barriers:
    program = current().program
    program.allocations += 1
    if layout == "mbarrier":
        return Barriers(f"barrier {program.allocations}", shape[0])
    return Memory(Shared(f"shared {program.allocations}", torch.zeros(list(shape), dtype=dtype)))
