"""Compiling ahead: which calls a description means, and that what was compiled is found again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.forks import environment
from tilewise.errors import AttentionError
from tilewise.warmup import Kind, kinds_of, requests, warmup

LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, [(128, 32, 8, {"causal": True})]),
        (SimpleNamespace(**LLAMA, head_dim=64), [(64, 32, 8, {"causal": True})]),
        (LLAMA | {"sliding_window": 512}, [(128, 32, 8, {"causal": True, "window": [511, 0]})]),
        (
            LLAMA | {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]},
            [(128, 32, 8, {"causal": True}), (128, 32, 8, {"causal": True, "window": [511, 0]})],
        ),
        (LLAMA | {"sliding_window": 512, "use_sliding_window": False}, [(128, 32, 8, {"causal": True})]),
        (LLAMA | {"attn_logit_softcapping": 50}, [(128, 32, 8, {"causal": True, "softcap": 50.0})]),
        (LLAMA | {"model_type": "gpt_oss"}, [(128, 32, 8, {"causal": True, "sinks": True})]),
        ({"text_config": LLAMA}, [(128, 32, 8, {"causal": True})]),
    ],
)
def test_a_config_says_which_calls_there_are(config: Any, expected: Any) -> None:
    found = kinds_of(config)
    assert [(kind.head_dim, kind.heads, kind.kv_heads, kind.options) for kind in found] == expected
    assert {kind.dtype for kind in found} == {"bfloat16"}


def test_a_config_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert kinds_of(tmp_path / "config.json") == kinds_of(LLAMA)


@pytest.mark.parametrize("packed", [False, True])
def test_true_stands_for_a_tensor(packed: bool) -> None:
    options = {"causal": True, "bias": True, "sinks": True, "alibi_slopes": False, "window": [7, 0]}
    for request in requests(Kind(64, 32, 4, 2, "float16", packed, True, options)):
        assert request.bias is not None
        assert request.sinks is not None
        assert request.bias.dtype == torch.float16
        assert request.spec.score_mod is None
        assert (request.spec.before, request.spec.after) == (7, 0)
        assert (request.cu_q is not None) == packed
        assert request.v.shape[-1] == 32


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_an_interpreted_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(AttentionError, match="TRITON_INTERPRET"):
        warmup(64, gpu="sm_90")


@pytest.mark.slow
def test_what_was_compiled_is_found_again(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "tilewise_lab", "warm", "--head-dim", "16", "--dtype", "fp32", "--full", "--no-backward",
        "--gpu", "sm_80", "--workers", "2",
    ]  # fmt: skip
    env = environment() | {"TRITON_CACHE_DIR": str(tmp_path)}
    said = [subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert said[0].startswith("2 kernels compiled (")  # lengths that tiles divide, and others
    assert said[1].startswith("0 kernels compiled, 2 were there")
