from __future__ import annotations

import inspect
import json
from functools import cache
from typing import Any

import pytest
import torch

import tilewise
from tests.forks import python
from tilewise_lab import cli
from tilewise_lab.costs.cost import Call
from tilewise_lab.costs.devices import DEVICES
from tilewise_lab.costs.devices import device as device_named
from tilewise_lab.costs.explain import estimate, explain

SHAPE = (4, 4096, 16, 128)


def told(*shape, **options):
    shape = shape or SHAPE
    return explain(shape, shape, shape, **{"device": "H200", "backend": "triton"} | options)


def test_tensors_meta_tensors_and_shapes_say_the_same():
    shape = (2, 300, 8, 64)
    told_by_shape = explain(shape, shape, shape, causal=True, device="H200")
    for where in ("cpu", "meta"):
        q = torch.zeros(shape, dtype=torch.bfloat16, device=where)
        assert explain(q, q, q, causal=True, device="H200").to_dict() == told_by_shape.to_dict()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward", [False, True])
def test_every_device(device, backward):
    found = told(device=device, backward=backward, backend="auto")
    assert found.device.name == device
    assert found.backend == ("hopper" if found.device.capability == 90 else "triton")
    assert found.binding == "matrix units"
    json.dumps(found.to_dict())
    assert device in str(found)


def test_the_backward_is_counted_when_gradients_are_wanted():
    q = torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    found = explain(q, q, q, device="H200", backend="triton")
    assert found.backward
    assert [kernel.name for kernel in found.kernels] == ["forward", "key", "query"]


def test_here_without_a_gpu():
    q = torch.zeros(1, 64, 2, 64)
    found = explain(q, q, q, device="cpu")
    assert (found.backend, found.device.name) == ("torch", "this CPU")
    assert "predicted" in str(found)
    near = explain(q, q, q, window=(3, 0), device="cpu")
    assert near.backend == "reference"
    assert "torch: a window" in str(near)


def test_tiling_moves_a_call_across_the_ridge():
    found = told(1, 8192, 16, 64).to_dict()
    assert found["intensity"]["naive"] < found["intensity"]["ridge"] < found["intensity"]["tiled"]


def test_packed_sequences():
    found = explain((60, 8, 64), (60, 8, 64), (60, 8, 64), [0, 10, 10, 60], [0, 10, 10, 60], device="H200")
    assert found.call.lengths == ((10, 10), (0, 0), (50, 50))
    assert "3 packed sequences" in str(found)


def test_decoding_is_bound_by_memory():
    found = explain((64, 1, 32, 128), (64, 8192, 32, 128), (64, 8192, 32, 128), device="H200")
    assert found.binding == "memory"
    assert any("grouped heads" in advice.text for advice in found.advice)


@pytest.mark.parametrize(
    ("shape", "options", "word"),
    [
        ((4, 4096, 16, 100), {}, "pad D 100 to 128"),
        ((1, 2049, 16, 128), {}, "S 2049 is 1 past a multiple"),
        ((4, 4096, 16, 128), {"dtype": "float32"}, "bfloat16"),
        ((1, 64, 2, 64), {}, "CUDA graph"),
        ((1, 4096, 1, 128), {}, "a larger batch is nearly free"),
    ],
)
def test_advice(shape, options, word):
    assert any(word in advice.text for advice in told(*shape, **options).advice)


def test_a_good_call_needs_no_advice():
    assert told().advice == []


def test_advice_on_strides():
    good = torch.empty(4, 4096, 16, 128, dtype=torch.bfloat16, device="meta")
    across = torch.empty(4, 4096, 128, 16, dtype=torch.bfloat16, device="meta").transpose(2, 3)
    odd = torch.empty(4, 4096, 16 * 128 + 1, dtype=torch.bfloat16, device="meta")[..., 1:].unflatten(2, (16, 128))
    said = [advice.text for advice in explain(good, across, odd, device="H200").advice]
    assert any("k's head dim is strided by 16" in text for text in said)
    assert any("v's rows do not start" in text for text in said)


def test_gains_are_sorted_and_real():
    found = told(1, 2049, 16, 128, dtype="float32")
    gains = [advice.gain for advice in found.advice if advice.gain]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > 1


@pytest.mark.parametrize(
    ("shape", "options", "what"),
    [
        ((4096, 16, 128), {}, "4 axes"),
        (SHAPE, {"device": "Voodoo"}, "H200"),
        (SHAPE, {"dtype": "int8"}, "bfloat16"),
        (SHAPE, {"window": (-1, 0)}, "window left"),
    ],
)
def test_refusals(shape, options, what):
    with pytest.raises(tilewise.AttentionError, match=what):
        told(*shape, **options)


def test_heads_must_divide():
    with pytest.raises(tilewise.AttentionError, match="multiple of k's 3"):
        explain((1, 8, 4, 64), (1, 8, 3, 64), (1, 8, 3, 64), device="H200")


COMPILE = """
import contextlib, io, json, sys
from tilewise_lab.costs.explain import explain
from tilewise_lab import cli

shape = (1, 512, 4, 64)
found = explain(shape, shape, shape, device=sys.argv[1], backend="triton", compiled=True)
used = found.resources["forward"]
with contextlib.redirect_stdout(io.StringIO()) as said:
    cli.main(["explain", *map(str, shape), "--kernel", "--device", sys.argv[1], "--backend", "triton"])
kernel = found.to_dict()["kernels"][0]
print(json.dumps([used.registers, used.shared, used.spills, kernel, str(found), said.getvalue()]))
"""


@cache
def compiled(device: str) -> tuple[Any, ...]:
    """Registers, shared memory and spills of the forward, its line of the explanation, all of it, and its stages; in a
    process of its own: here Triton interprets."""
    pytest.importorskip("triton")
    done = python("-c", COMPILE, device)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.mark.slow
def test_registers_and_shared_memory_come_from_the_compiler():
    registers, shared, spills, kernel, words, _ = compiled("A100")
    tile = kernel["tile"]
    assert 0 < registers <= 255
    assert 2 * 64 * (tile["block_m"] + tile["block_n"]) <= shared <= device_named("A100").shared  # Q and K, at least
    assert spills == 0
    assert kernel["registers"] == registers
    assert f"{registers} registers" in words


@pytest.mark.slow
def test_loads_are_in_flight_while_the_matrix_units_work():
    """HBM -> SRAM by copies that do not wait: as many buffers as stages, and a wait for the oldest alone."""
    *_, said = compiled("A100")
    seen = {line.split()[1]: int(line.split()[2]) for line in said.splitlines() if len(line.split()) > 3}
    assert {"async_copy", "async_wait", "cp.async", "LDGSTS", "mma.sync"} <= set(seen)


@pytest.mark.slow
def test_every_stage_of_the_compiler_is_shown():
    """ttir as written, ttgir with layouts and buffers, ptx, and what the SM executes: `tilewise explain --kernel`."""
    *_, said = compiled("H200")
    seen = {(line.split()[0], line.split()[1]) for line in said.splitlines() if len(line.split()) > 3}
    assert {
        ("ttir", "tt.load"), ("ttir", "tt.dot"), ("ttir", "tt.reduce"), ("ttgir", "local_alloc"),
        ("ttgir", "async_copy"), ("ttgir", "warp_group_dot"), ("ptx", "cp.async"), ("ptx", "wgmma.mma_async"),
        ("ptx", "ex2.approx"), ("sass", "HGMMA"), ("sass", "LDGSTS"), ("sass", "MUFU"),
    } <= seen  # fmt: skip
    assert "0 bytes spilled" in said


def test_hopper_kernels_are_known():
    found = estimate(Call(4, 4096, 4096, 16, 16, 128, 128), True, device_named("H200"), "hopper")
    assert [kernel.name for kernel in found.kernels] == ["hopper forward", "hopper backward"]
    assert found.prediction.device < told(backward=True).prediction.device


def test_the_public_function_prints_and_returns(capsys):
    found = tilewise.explain(SHAPE, SHAPE, SHAPE, device="H200")
    assert capsys.readouterr().out == f"{found}\n"
    tilewise.explain(SHAPE, SHAPE, SHAPE, device="H200", show=False)
    assert capsys.readouterr().out == ""


def test_command(capsys):
    assert cli.main(["explain", "1", "2049", "16", "128", "--device", "H200", "--causal", "--no-compile"]) == 0
    said = capsys.readouterr().out
    assert "causal" in said
    assert "predicted" in said
    assert cli.main(["explain", "--device", "A100", "--json", "--no-compile", "--window", "128", "all"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["call"]["before"], found["call"]["after"]) == (128, None)
    assert {
        "call",
        "device",
        "backend",
        "flops",
        "bytes",
        "intensity",
        "roofs",
        "binding",
        "kernels",
        "seconds",
    } <= set(found)
    assert cli.main(["explain", "1", "2", "--device", "H200"]) == 2


def test_score_terms_are_counted():
    bias = torch.empty(1, 16, 4096, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    capped = told(backend="auto", softcap=30.0, bias=bias)
    assert [kernel.name for kernel in capped.kernels] == ["hopper forward", "hopper backward"]
    assert capped.call.terms.names == ("softcap", "bias")
    assert capped.call.terms.read == capped.call.terms.written == 2 * 16 * 4096**2
    assert capped.backward  # the bias wants its gradient
    assert capped.prediction.device > told(backend="auto", backward=True).prediction.device
    assert "softcap, bias: 17 operations on each pair" in str(capped)
    json.dumps(capped.to_dict())


def test_a_block_mask_of_a_narrower_band_is_refused():
    blocks = tilewise.block_mask(tilewise.mods.block_diagonal(512), 4096, 4096, causal=True)
    with pytest.raises(tilewise.AttentionError, match="window of the block mask"):
        told(mask_mod=blocks, causal=False)
    assert told(mask_mod=blocks, causal=True).call.terms.visited < 1


def test_block_masks_save_what_they_skip():
    mask = tilewise.mods.block_diagonal(512)
    blocks = tilewise.block_mask(mask, 4096, 4096)
    every, some = told(mask_mod=mask), told(mask_mod=blocks)
    assert some.flops == every.flops / 8
    assert 4 < every.prediction.device / some.prediction.device < 8
    assert any("tilewise.block_mask" in advice.text for advice in every.advice)
    assert not any("tilewise.block_mask" in advice.text for advice in some.advice)


def test_explain_takes_what_attention_takes():
    """Every keyword of both functions, with the same defaults."""
    known = inspect.signature(explain).parameters
    for function in (tilewise.attention, tilewise.attention_varlen):
        for name, parameter in inspect.signature(function).parameters.items():
            assert name in known
            if parameter.default is not parameter.empty:
                assert known[name].default == parameter.default


def test_terms_are_refused_as_attention_refuses_them():
    with pytest.raises(tilewise.AttentionError, match="softcap"):
        told(softcap=-1.0)
    with pytest.raises(tilewise.AttentionError, match="H of bias"):
        told(bias=torch.zeros(1, 3, 4096, 4096, device="meta"))


def test_a_fixed_order_costs_time():
    times = [told(backend="hopper", backward=True, deterministic=same).prediction.device for same in (False, True)]
    assert times[0] < times[1]


def test_the_command_takes_terms(capsys):
    terms = ["--softcap", "30", "--alibi", "--bias", "--dropout", "0.1", "--deterministic", "--backward"]
    assert cli.main(["explain", "1", "512", "4", "64", "--device", "A100", "--no-compile", *terms]) == 0
    said = capsys.readouterr().out
    assert "softcap, bias, alibi_slopes, dropout_p:" in said
    assert "the same bits every time" in said
    assert cli.main(["explain", "--softcap", "-1", "--device", "A100"]) == 2
    assert "softcap: found -1.0" in capsys.readouterr().err


TINY = (1, 16, 8, 64)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"q": (1, -16, 8, 64)}, "q: found (1, -16, 8, 64); expected a tensor, or the sizes of one"),
        ({"q": "abc"}, "q: found 'abc'; expected a tensor"),
        ({"k": None}, "k: found None; expected a tensor"),
        ({"q": (1, 16, 8, 1000)}, "head dim of q: found 1000; expected 1 to 512"),
        ({"device": 3}, "device: found 3; expected A100"),
        ({"device": ""}, "device: found ''; expected A100"),
        ({"is_causal": True}, "keyword argument: found is_causal=; expected causal=True"),
    ],
)
def test_explain_refuses_as_attention_does(asked, said):
    with pytest.raises(tilewise.AttentionError) as error:
        explain(**({"q": TINY, "k": TINY, "v": TINY, "device": "H200"} | asked))
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("shape", "layout", "said"), [((1, 8, 512, 64), "bshd", True), ((1, 8, 512, 64), "bhsd", False)]
)
def test_what_looks_like_another_layout_is_said(shape, layout, said):
    found = explain(shape, shape, shape, device="H200", layout=layout)
    assert any("layout='bhsd'" in advice.text for advice in found.advice) is said
