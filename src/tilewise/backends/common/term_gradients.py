"""The gradients of biases and captured tensors: the launches that sum ds, and the reduction of their results. Those of
sinks are in `sinks`.

A tensor read at (b, h), at a query or at a key costs one more pass over the scores and O(S) memory. One read at both
(a full bias, a table of distances) is summed over batch rows and heads by the program of each tile: into the bias
itself, or, for a table, into strips of at most STRIP floats, which torch adds by index; where the index depends on
i - j alone, each strip is summed along its diagonals first. All orders are fixed: two runs agree bit for bit.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...mods import PROGRAMS
from ...mods.blocks import without_lists
from ...mods.bounds import only_difference
from ...mods.expr import N_K, N_Q, B, Expr, H, I, J, Place, const, load, scatter_, sites
from ...request import BackwardInputs, Request
from . import mod_source as mods
from .device.structs import FAR, Bias
from .kernel_call import KernelCall, call_shape
from .kernel_config import launch_options, tile_of
from .launch import DeviceMemory, Launch, target_of
from .preprocess import preprocess_launch, row_statistics
from .renormalise import renormalised
from .score_terms import device_terms, is_fast, mask_mod, score_mod_with_derivative
from .sinks import build_sink_gradient
from .term_sums import line_sums_kernel, tile_sums_kernel

STRIP = 1 << 26
NOWHERE = Place(*[None] * 6)


def term_gradients(
    request: Request, bwd_inputs: BackwardInputs, wanted: Sequence[bool]
) -> Callable[[Sequence[Tensor | None]], list[Tensor]]:
    """A runner (see `backends.protocol`) of the gradients of bias, sinks and the score mod's tensors, of those
    that are `wanted`."""
    spec, (bias, sinks, *others) = request.spec, wanted
    of_sinks = None
    if sinks:
        of_sinks = KernelCall(build_sink_gradient(spec), (*request.tensors(), *bwd_inputs), request.q.device)
        if not bias and not any(others):
            return of_sinks

    def run(tensors: Sequence[Tensor | None]) -> list[Tensor]:
        found = sums_of_terms(Request.of(spec, tensors[:-4]), BackwardInputs(*tensors[-4:]), bias, others)  # type: ignore[arg-type]
        if of_sinks is not None:
            found.insert(1 if bias else 0, *of_sinks(tensors))
        return found

    return run


def sums_of_terms(request: Request, bwd_inputs: BackwardInputs, bias: bool, others: Sequence[bool]) -> list[Tensor]:
    """The gradients of the bias, if wanted, and of the wanted ones among the score mod's tensors."""
    q, spec = request.q, request.spec
    found: list[Tensor] = []
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        sums = Sums(request, bwd_inputs)
        if bias and request.bias is not None:
            found.append(sums.of_bias(request.bias).to(request.bias.dtype))
        for n, (x, wants) in enumerate(zip(request.score, others, strict=True)):
            if wants:
                total = x.new_zeros(x.shape, dtype=torch.float32)
                assert spec.score_mod is not None
                for m, (where, _) in enumerate(PROGRAMS[spec.score_mod].sites):
                    if where.value == n:
                        sums.add(total, where, mods.site(spec.score_mod, m, is_fast(q, sums.gpu)))
                found.append(total.to(x.dtype))
    return found


class Sums:
    """The row statistics of one backward pass, and the sums that are taken with them."""

    def __init__(self, request: Request, bwd_inputs: BackwardInputs) -> None:
        request = without_lists(request)
        self.request, self.spec = request, request.spec
        self.q, self.k, self.cu_q, self.cu_k = request.q, request.k, request.cu_q, request.cu_k
        self.size = call_shape(request)
        self.gpu = target_of(request.q.device).gpu
        memory = DeviceMemory(request.q.device)
        first, bwd_inputs = renormalised(request, bwd_inputs, self.gpu, memory)
        preprocess, self.saved = preprocess_launch(request, bwd_inputs, row_statistics(request, memory))
        lse2, self.delta = (x.ptr for x in self.saved[4:6])
        self.lse2 = lse2
        if self.size.packed:  # the gaps between sequences
            lse2.fill_(torch.inf)
            self.delta.zero_()
        for launch in (*first, preprocess):
            launch()
        self.tile = tile_of("sums", self.q.element_size(), self.size, self.gpu)
        self.r: int | None = None  # the position in a row of what is summed

    def of_bias(self, bias: Tensor) -> Tensor:
        batch, heads, n_q, n_k = bias.shape
        if not bias.numel():
            return torch.zeros_like(bias)
        if n_q > 1 and n_k > 1:
            total = bias.new_empty(bias.shape)
            self._tiles(Bias(total, FAR, FAR, total.stride()), 0, n_q, n_k, batch > 1, heads > 1, None)
            return total
        axes = (n if size > 1 else const(0) for n, size in zip((B, H, I, J), bias.shape, strict=True))
        sizes = [n + (self.size.packed and n > 1) for n in (n_q, n_k)]  # the last: tokens past the end of the bias
        total = bias.new_zeros((batch, heads, *sizes), dtype=torch.float32)
        self.add(total, load(0, *axes, kind="float"), None)
        return total[:, :, :n_q, :n_k]

    def add(self, total: Tensor, where: Expr, site: Any) -> None:
        """Adds to total[indices of `where`] the gradient of the value read there; for a row, one position at a time."""
        deps = frozenset().union(*(x.deps for x in where.args))
        for at in sites(where, NOWHERE, self.request.score):
            self.r = at.r
            if {"i", "j"} <= deps:
                self._add_strips(total, where, site, deps)
            else:
                self._add_lines(total, where, site, by_key="j" in deps)

    def _add_lines(self, total: Tensor, where: Expr, site: Any, by_key: bool) -> None:
        x = self.k if by_key else self.q
        sums = x.new_zeros((*x.shape[:-3], self.size.heads, x.shape[-3]), dtype=torch.float32)  # (B, H, S) or (H, T)
        n, block = (self.size.n_k, self.tile.block_n) if by_key else (self.size.n_q, self.tile.block_m)
        size = self.size
        Launch(
            line_sums_kernel,
            size.programs(n, size.heads, block),
            (*self._shared_args(sums), size.tiles(n, block), size.heads, size.batch, self._device_terms()),
            self._options(site) | {"KEYS": by_key},
        )()
        place = self._line_place(by_key, sums)
        scatter_(total, where, sums, place, self.request.score, self.spec.score_numbers)

    def _line_place(self, by_key: bool, sums: Tensor) -> Place:
        def count(n: int) -> Tensor:
            return torch.arange(n, device=sums.device)

        h, position = count(self.size.heads)[:, None], count(sums.shape[-1])
        if self.cu_q is None or self.cu_k is None:
            b: Tensor = count(self.size.batch)[:, None, None]
            n_q: Any = self.size.n_q
            n_k: Any = self.size.n_k
        else:
            cu = (self.cu_k if by_key else self.cu_q).long()
            b = torch.bucketize(position, cu[1:], right=True).clamp(max=self.size.batch - 1)
            position = position - cu[b]
            n_q, n_k = (x.long().diff()[b] for x in (self.cu_q, self.cu_k))
        return Place(b, h, position, position, n_q, n_k, self.r).within(self.request.position_offsets)

    def _add_strips(self, total: Tensor, where: Expr, site: Any, deps: frozenset[str]) -> None:
        size = self.size
        n_q, n_k = size.n_q, size.n_k  # packed: all tokens, if the longest sequence is not known
        if self.spec.max_seqlen is not None:
            n_q, n_k = (min(n, self.spec.max_seqlen) for n in (n_q, n_k))
        if 0 in (n_q, n_k, size.batch):
            return
        moved = self.request.position_offsets is not None
        # of equal lengths, an index that depends on n_q - n_k alone is the same for all sequences
        aligned = not moved and self._is_aligned() and only_difference(where.args, N_Q, N_K)
        per_batch = "b" in deps or (size.packed and (moved or bool(deps & {"n_q", "n_k"})) and not aligned)
        lines = (size.batch if per_batch else 1, size.heads if "h" in deps else 1)
        rows = min(max(128, STRIP // (lines[0] * lines[1] * n_k) // 128 * 128), -(-n_q // 128) * 128)
        diagonal = only_difference(where.args, I, J) and not moved
        count = [torch.arange(n, device=total.device) for n in (*lines, n_k)]
        b, h, j = count[0][:, None, None, None], count[1][:, None, None], count[2]
        lengths: tuple[Any, Any] = (n_q, n_k)
        if self.cu_q is not None and self.cu_k is not None and per_batch:
            q_lengths, k_lengths = (x.long().diff()[:, None, None, None] for x in (self.cu_q, self.cu_k))
            lengths = q_lengths, k_lengths
        for start in range(0, n_q, rows):
            height = min(rows, n_q - start)
            # a row of a strip lies one further right than the row above it, and j runs backwards: i - j is a column
            width = n_k + height - 1 if diagonal else n_k
            strip = total.new_zeros((*lines, height * width), dtype=torch.float32)
            strides = (*strip.stride()[:2], *((width + 1, -1) if diagonal else (width, 1)))
            at = strip.view(-1)[n_k - 1 :] if diagonal else strip
            self._tiles(Bias(at, FAR, FAR, strides), start, height, n_k, per_batch, "h" in deps, site)
            strip = strip.view(*lines, height, width)
            if diagonal:
                strip = strip.sum(2, keepdim=True)
                distance = torch.arange(width, device=total.device) + (start - n_k + 1)
                place = Place(b, h, distance, torch.zeros_like(distance), *lengths, self.r)
            else:
                i = torch.arange(start, start + height, device=total.device)[:, None]
                place = Place(b, h, i, j, *lengths, self.r).within(self.request.position_offsets)
            scatter_(total, where, strip, place, self.request.score, self.spec.score_numbers)

    def _is_aligned(self) -> bool:
        """Whether every packed sequence has as many queries as keys, by one table of offsets for both."""
        return self.cu_q is not None and self.cu_k is not None and self.cu_q.data_ptr() == self.cu_k.data_ptr()

    def _tiles(
        self, sums: Bias, row0: int, rows: int, columns: int, per_batch: bool, per_head: bool, site: Any
    ) -> None:
        size, tile = self.size, self.tile
        lines = (size.batch if per_batch else 1) * (size.heads if per_head else 1)
        Launch(
            tile_sums_kernel,
            -(-rows // tile.block_m) * -(-columns // tile.block_n) * lines,
            (*self._shared_args(sums), row0, rows, columns, size.batch, size.heads, self._device_terms()),
            self._options(site) | {"BATCHES": per_batch, "HEADS": per_head},
        )()

    def _shared_args(self, sums: Tensor | Bias) -> tuple[Any, ...]:
        """The first arguments of both kernels."""
        size, spec = self.size, self.spec
        lengths = (self.cu_q, self.cu_k, size.n_q, size.n_k)
        return self.saved, sums, *lengths, spec.before, spec.after, spec.scale

    def _device_terms(self) -> Any:
        terms = device_terms(self.request, self.gpu)
        return terms if self.r is None else terms._replace(score=(*terms.score, self.r))

    def _options(self, site: Any) -> dict[str, Any]:
        named = {
            "SCORE_MOD": score_mod_with_derivative(self.request, self.gpu),
            "MASK_MOD": mask_mod(self.request),
            "SITE": site,
        }
        return launch_options(self.request, self.tile, self.gpu) | named
