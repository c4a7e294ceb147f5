"""The KV cache on a GPU: every page size and layout at odd sizes, graphs that serve other lengths than they recorded,
no look of the host at what lives on the device, offsets beyond 32 bits, the same bits."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.kv_cases import KvCase, KvInputs, compare, inputs
from tilewise_lab.bench import kv as bench
from tilewise_lab.bench import kv_cases as bench_cases

LENGTHS = (700, 1, 0, 333, 64, 4097)


def call(x: KvInputs, **options: Any) -> tuple[Tensor, Tensor]:
    given = {"backend": "triton"} | x.options | options
    with torch.no_grad():
        found: tuple[Tensor, Tensor] = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, return_lse=True, **given)
    return found


def check(
    case: KvCase, dtype: torch.dtype = torch.bfloat16, truth: dict[str, Any] | None = None, **options: Any
) -> None:
    x = inputs(case, dtype, "cuda")
    compare(call(x, **options), x, **(options if truth is None else truth))


@pytest.mark.parametrize("page", [0, 1, 2, 3, 8, 16, 24, 64, 128, 256])
@pytest.mark.parametrize("dim", [64, 128])
def test_pages(page: int, dim: int) -> None:
    check(KvCase(LENGTHS, page=page, heads=8, kv_heads=2, dim=dim))
    check(KvCase(LENGTHS, queries=3, new=3, page=page, heads=8, kv_heads=2, dim=dim))


@pytest.mark.parametrize(("dtype", "dim"), [*product([torch.float16, torch.bfloat16, torch.float32], [1, 40, 96, 256])])
def test_dims(dtype: torch.dtype, dim: int) -> None:
    check(KvCase((300, 77, 1030), queries=2, new=2, dim=dim, dim_v=max(1, dim - 7)), dtype)
    check(KvCase((300, 77, 1030), queries=(40, 1, 9), dim=dim, page=0), dtype)


def test_dim_512() -> None:
    check(KvCase((300, 77), queries=2, dim=512))


@pytest.mark.parametrize("layout", ["interleaved", "heads_first", "wide"])
@pytest.mark.parametrize("csr", [False, True])
def test_layouts(layout: str, csr: bool) -> None:
    check(KvCase(LENGTHS, new=1, layout=layout, csr=csr, page=16, dim=128))
    check(KvCase(LENGTHS, queries=(9, 1, 2, 70, 0, 300), layout=layout, csr=csr, page=8, dim=64, padding=5))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (32, 8), (8, 1), (40, 8), (71, 1), (128, 1)])
def test_groups(heads: int, kv_heads: int) -> None:
    check(KvCase((700, 33, 129), heads=heads, kv_heads=kv_heads, dim=64))
    check(KvCase((700, 33, 129), heads=heads, kv_heads=kv_heads, dim=64, queries=5, new=5), window=(40, 0))


@pytest.mark.parametrize("options", [
    {"window": (100, 0)}, {"window": (0, 0)}, {"window": (50, 3), "causal": False}, {"causal": False},
    {"softcap": 5.0}, {"scale": -0.1},
], ids=str)  # fmt: skip
def test_bands(options: dict[str, Any]) -> None:
    check(KvCase(LENGTHS, queries=4, new=4, dim=64), **options)
    check(KvCase(LENGTHS, queries=(1, 3, 0, 100, 7, 5), dim=128, starts=(5, 0, 0, 300, 63, 4000)), **options)


def test_terms() -> None:
    sinks, slopes = torch.randn(8, device="cuda"), torch.rand(8, device="cuda")
    case = KvCase(LENGTHS, queries=2, new=2, heads=8, kv_heads=2, dim=64)
    check(case, sinks=sinks)
    check(case, sinks=sinks, window=(127, 0))
    check(case, truth={"alibi": slopes}, alibi_slopes=slopes)


def test_a_tree() -> None:
    torch.manual_seed(0)
    tree = torch.tril(torch.rand(6, 8, 8) < 0.5) | torch.eye(8, dtype=torch.bool)
    case = KvCase(LENGTHS, queries=8, new=8, dim=64)
    check(case, truth={"tree": tree.tolist()}, tree=tree.cuda())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool) -> None:
    """As on the CPU."""
    torch.manual_seed(0)
    cpu = inputs(KvCase((20, 3, 5), queries=(3, 1, 2), new=(3, 1, 2), page=8, dim=64))
    cos, sin = torch.rand(64, 20), torch.rand(64, 20)
    found = []
    for device in ("cpu", "cuda"):
        given = {
            name: tuple(t.to(device) for t in y) if isinstance(y, tuple) else y.to(device)
            for name, y in cpu.options.items()
        }
        new, v_new = given.pop("k_new"), given.pop("v_new")
        k, v = cpu.k.to(device), cpu.v.to(device)
        rotary = tilewise.Rotary(cos.to(device), sin.to(device), interleaved)
        q = tilewise.append_kv(
            new, v_new, k, v, cpu.lengths.to(device), q=cpu.q.to(device), rotary=rotary, **given,
            backend="triton" if device == "cuda" else "reference",
        )  # fmt: skip
        assert q is not None
        found.append([x.cpu().nan_to_num(9.0) for x in (q, k, v)])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("split", [None, 0, 256])
def test_the_same_bits(split: int | None) -> None:
    x = inputs(KvCase(LENGTHS, dim=128, heads=8), torch.bfloat16, "cuda")
    first = call(x, split=split)
    compare(first, x)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(call(x, split=split), first, strict=True))


@pytest.mark.parametrize("window", [None, (300, 0)])
def test_bits_that_no_batch_changes(window: Any) -> None:
    x = inputs(KvCase(LENGTHS, dim=128, heads=8, queries=(1,) * 6), torch.bfloat16, "cuda")
    options: Any = {"split": 512, "window": window, "sinks": torch.randn(8, device="cuda"), "backend": "triton"}
    batch = call(x, **options)
    table = x.options["page_table"]
    for b, count in ((0, 1), (3, 200), (5, 1), (5, 400)):
        q = torch.cat([torch.randn(count - 1, 8, 128).bfloat16().cuda(), x.q[b : b + 1]])
        cu = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        out, lse = tilewise.attention_kv(
            q, x.k, x.v, x.lengths[b : b + 1], page_table=table[b : b + 1], cu_seqlens_q=cu, return_lse=True, **options
        )
        assert torch.equal(out[-1], batch[0][b])
        assert torch.equal(lse[:, -1], batch[1][:, b])


def test_one_graph_serves_all_lengths() -> None:
    """Recorded once, replayed with other lengths, tables, new tokens and numbers of live sequences."""
    batch, page, width = 6, 16, 70
    lives = (5,) * batch, (*LENGTHS[:5], 900), (0,) * batch, (1000, 0, 0, 0, 0, 0), (17, 600, 1, 16, 15, 1)
    cases = [KvCase(n, new=1, dim=128, heads=8, page=page) for n in lives]
    k, v = (torch.full((400, page, 2, 128), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q, new_k, new_v = (torch.zeros(batch, 1, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    table = torch.zeros(batch, width, dtype=torch.int32, device="cuda")
    options: Any = {"page_table": table, "k_new": new_k, "v_new": new_v, "backend": "triton"}

    def step() -> tuple[Tensor, Tensor]:
        plan = tilewise.plan_kv(q, k, v, lengths, **options)
        for _ in range(2):  # two layers
            found: tuple[Tensor, Tensor] = tilewise.attention_kv(
                q, k, v, lengths, plan=plan, return_lse=True, **options
            )
        return found

    with torch.no_grad():
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
    for seed, case in enumerate(cases):
        x = inputs(case, torch.bfloat16, "cuda", seed)
        given = x.options["page_table"]
        k.fill_(torch.nan)
        v.fill_(torch.nan)
        k[: x.k.shape[0]], v[: x.v.shape[0]] = x.k, x.v
        table.fill_(2147480000)
        table[:, : given.shape[1]] = given
        lengths.copy_(x.lengths)
        for room, y in ((q, x.q), (new_k, x.options["k_new"]), (new_v, x.options["v_new"])):
            room.copy_(y)
        for y in found:
            y.fill_(torch.nan)
        graph.replay()
        compare(found, x)


def test_recordings_of_the_bench_keep_what_they_read() -> None:
    """Each recording gives back memory that nobody holds: plans of those before it must not be among it."""
    case = bench_cases.KvCase("small", "tiny", (700, 33, 64), heads=8, kv_heads=2, dim=128)
    x = bench_cases.inputs(case, torch.device("cuda"), torch.bfloat16)
    callers = bench._callers(case, x, ["", "16x64x4x3x3x1x168"], {})
    works = {name: bench._admit(make, case, x, torch.device("cuda")) for name, make in callers.items()}
    torch.full((64, 2**20), -1, device="cuda")  # over whatever was given back
    for name, (entry, work) in works.items():
        assert work is not None, f"{name}: {entry}"
        assert "wrong" not in entry, f"{name}: {entry}"
        work()
    torch.cuda.synchronize()


def test_the_host_reads_nothing() -> None:
    x = inputs(
        KvCase(LENGTHS, queries=(1, 2, 0, 3, 4, 5), new=(1, 2, 0, 3, 4, 5), dim=64, padding=3), torch.bfloat16, "cuda"
    )
    rotary = tilewise.Rotary(torch.rand(8192, 16, device="cuda"), torch.rand(8192, 16, device="cuda"))
    call(x, rotary=rotary)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(x, rotary=rotary)
        call(x, rotary=rotary, split=256)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_beyond_32_bits() -> None:
    """Pages so far apart that bytes and elements both pass 2^31."""
    pages, stride = 3100, 1_400_000
    pool = torch.empty(pages * stride, dtype=torch.bfloat16, device="cuda")
    x = inputs(KvCase((700, 33), new=1, dim=128, page=16), torch.bfloat16, "cuda")
    far = [pages - 1 - n for n in range(x.k.shape[0])]
    k, v = (torch.as_strided(pool, (pages, 16, 2, 128), (stride, 256, 128, 1), at) for at in (0, 8192))
    for n, page in enumerate(far):
        k[page], v[page] = x.k[n], x.v[n]
    table = x.options["page_table"]
    known = (table >= 0) & (table < x.k.shape[0])
    moved = torch.where(known, pages - 1 - table, table)
    options = x.options | {"page_table": moved, "backend": "triton"}
    found = tilewise.attention_kv(x.q, k, v, x.lengths, **options, return_lse=True)
    compare(found, x)


def test_dims_beyond_32_bits() -> None:
    """Queries, results, new tokens and caches whose dims lie so far apart."""
    step, dim = 2**25 + 8, 128  # 2^32 elements from the first dim to the last
    pool = torch.empty(dim * step, dtype=torch.bfloat16, device="cuda")

    def far(x: Tensor, at: int) -> Tensor:
        strides = (x.shape[1] * x.shape[2], x.shape[2], 1, step)
        return torch.as_strided(pool, x.shape, strides, at).copy_(x)

    x = inputs(KvCase((300, 33), new=1, dim=dim, page=16), torch.bfloat16, "cuda")
    options = x.options | {"k_new": far(x.options["k_new"], 0), "v_new": far(x.options["v_new"], 2**16)}
    q, out, k, v = far(x.q, 2**17), far(x.q, 2**18), far(x.k, 2**19), far(x.v, 2**20)
    compare(tilewise.attention_kv(q, k, v, x.lengths, **options, out=out, return_lse=True, backend="triton"), x)


def test_compiled() -> None:
    x, y = (inputs(KvCase((200, 33), new=1, dim=64), torch.bfloat16, "cuda") for _ in range(2))

    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, new: Tensor) -> Tensor:
        return tilewise.attention_kv(q, k, v, lengths, page_table=table, k_new=new, v_new=new, backend="triton") * 2

    new = x.options["k_new"]
    compiled = torch.compile(step, fullgraph=True)
    with torch.no_grad():
        a = compiled(x.q, x.k, x.v, x.lengths, x.options["page_table"], new)
        b = step(y.q, y.k, y.v, y.lengths, y.options["page_table"], new)
    assert torch.equal(a, b)
    assert torch.equal(x.k.nan_to_num(), y.k.nan_to_num())


@pytest.mark.slow
def test_time_grows_with_the_keys_alone() -> None:
    """One long sequence among short ones takes what as many keys take anywhere."""
    times = []
    for lengths in ((65536, *[512] * 63), (1536,) * 64):
        case = KvCase(lengths, heads=32, kv_heads=8, dim=128)
        k, v = (torch.randn(6500, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        table = torch.randint(0, 6500, (64, 4096), dtype=torch.int32, device="cuda")
        q = torch.randn(64, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        n = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
        plan = tilewise.plan_kv(q, k, v, n, page_table=table, backend="triton")
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for repeat in range(12):
            if repeat == 2:
                events[0].record()
            tilewise.attention_kv(q, k, v, n, page_table=table, plan=plan, backend="triton")
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    assert times[0] < 1.5 * times[1]


MANY = [KvCase((700, 4097, 0, 333), queries=300, page=page, dim=dim, heads=8, kv_heads=2) for page, dim in (
    (0, 128), (8, 64), (16, 128), (24, 128), (64, 128), (256, 128), (16, 256), (64, 192),
)]  # fmt: skip


@pytest.mark.parametrize("case", MANY, ids=str)
def test_many_queries_on_hopper(case: KvCase) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    for variant in (case, case.but(queries=(300, 1000, 1, 2), padding=9), case.but(layout="interleaved")):
        x = inputs(variant, torch.bfloat16, "cuda")
        compare(call(x, backend="hopper"), x)
        x.options |= {"window": (200, 0)}
        compare(call(x, backend="hopper"), x, window=(200, 0))
