"""Where the kernels run: on the GPU where tests/gpu is asked for and there is one, else in Triton's interpreter.

Triton and CUDA decide once per process, so the tests of tests/gpu are a run of their own (`./run test` makes both), and
the others see no GPU. Triton is imported here, before any test. Offline compiles need a process of their own
(tests/tilewise/backends/test_compile.py).
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec
from zlib import crc32

import pytest
import torch

ON_GPU = "TILEWISE_TEST_GPU"  # how pytest-xdist's workers know what was asked
if os.environ.setdefault(ON_GPU, str(int(any("tests/gpu" in arg for arg in sys.argv[1:])))) == "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and DEVICE == "cpu"

if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
    try:  # gluon asserts that the variable is what it was when triton was imported
        for module in (
            "tilewise.backends.common.hvp_launches",
            "tilewise.backends.common.jvp_launches",
            "tilewise.backends.common.kv.runners",
            "tilewise.backends.common.kv.prefix_launches",
            "tilewise.backends.common.term_gradients",
            "tilewise.backends.triton.offline",
            "tilewise.backends.hopper.offline",
            "tilewise.backends.hopper.kv_launches",
            "tilewise.backends.hopper.hvp_launches",
            "tilewise.backends.hopper.topk",
            "tilewise.backends.common.best_blocks",
            "tilewise.backends.common.merge_kernel",
            "tilewise.backends.common.topk",
            "tilewise.backends.common.block_parts",
            "tilewise.backends.common.combine_parts",
            "tilewise.backends.common.nsa",
            "tests.tilewise.backends.probes",
            "triton.experimental.gluon.language",
        ):
            if find_spec(module) is not None:
                import_module(module)
        interpreter = import_module("tilewise_lab.interpreter")
        interpreter.teach_bfloat16()
        interpreter.patch_once_per_launch()
    finally:
        del os.environ["TRITON_INTERPRET"]


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="triton" works within the test, on whatever device is here."""
    if not HAS_TRITON:
        pytest.skip("no triton here: it comes with a CUDA build of torch, or on Linux from PyPI")
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that computes attention here."""
    if request.param == "triton":
        request.getfixturevalue("triton_runs")
    return request.param


# Of tests that are many alike, one in so many runs, always the same; with --all they all do. By file, of the slow ones:
ONE_IN = {
    "test_bounds.py": 24, "test_transformers.py": 12, "test_sdpa.py": 5, "test_origin.py": 5, "test_kv_compile.py": 4,
    "test_backward.py": 8, "test_backward_wide.py": 4, "test_compile.py": 22, "test_targets.py": 12,
    "test_backward_compile.py": 20, "test_notebooks.py": 3, "test_commands.py": 2,
    "test_coverage.py": 2, "test_ops.py": 2,
}  # fmt: skip
# of the quick ones that Triton's interpreter, or a compiler, takes seconds for:
SOME_OF = {
    "test_attention.py": 4, "test_features.py": 4, "test_attention_kv.py": 4, "test_groups.py": 4, "test_leaks.py": 3,
    "test_refusals.py": 3, "test_bounds.py": 3, "test_commands.py": 2, "test_flex.py": 3, "test_parts.py": 2,
    "test_strides.py": 2, "test_terms.py": 2, "test_max_logit.py": 2, "test_x_transformers.py": 2,
}  # fmt: skip
# and by name, of those that Triton's interpreter takes seconds for:
OF_THESE = {
    "test_random_combinations": 3, "test_block_masks_of_packed_sequences": 3, "test_random": 4, "test_tile": 3,
    "test_more_programs_than_work": 6, "test_anything": 3, "test_within_budget": 6, "test_sinks_of_any_stride": 8,
    "test_parts_make_the_whole": 4, "test_every_layout": 4, "test_packed_is_dense_sequence_by_sequence": 2,
    "test_formats_and_scales": 6, "test_k_and_v_are_independent": 4, "test_gradients_of_a_biased_row": 4,
    "test_a_row_of_equals_is_a_mean": 2, "test_a_known_call_uses_its_own_tensors": 2,
    "test_sums_of_integers": 2, "test_many_groups_of_dims": 2, "test_sinks_trees_splits_and_plans": 2,
    "test_appended_bytes": 4, "test_quantised": 2, "test_kernels_run_from_slots_and_addresses": 3,
    "test_lists_say_what_no_mask_mod_does": 2, "test_whatever_a_mask_reads_is_read_again": 2,
    "test_layouts": 4, "test_one_scale_by_token": 4, "test_of_the_kernels": 2, "test_a_hidden_token": 6,
    "test_as_permuted": 2, "test_partial_tiles_as_bits": 12, "test_ordered_sums_with_tile_lists": 6,
    "test_results": 4, "test_mla": 4, "test_right_in_every_interleaving": 4,
    "test_a_bound_of_queries_that_is_too_small": 2, "test_bands_and_scores": 4,
    "test_tiles_fit": 2, "test_a_ring_of_32": 3, "test_garbage_is_clamped": 6, "test_opcheck": 4,
    "test_opcheck_of_second_derivatives": 2, "test_tiles_of_8_rows": 4, "test_dense_queries": 2,
    "test_what_a_query_does_not_see_cannot_reach_it": 2, "test_alone": 8,
}  # fmt: skip


def is_left_out(item: pytest.Item) -> bool:
    name = item.name.partition("[")[0]
    if item.get_closest_marker("slow"):
        share = ONE_IN.get(item.path.name, 1)
    else:
        share = OF_THESE.get(name) or SOME_OF.get(item.path.name, 1)
    return crc32(item.nodeid.encode()) % share != 0


def chosen(items: list[pytest.Item]) -> set[pytest.Item]:
    """The share of each test, or the first of its parameters: every test runs."""
    by_test: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    return {x for alike in by_test.values() for x in [y for y in alike if not is_left_out(y)] or alike[:1]}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all") or config.args != config.getini("testpaths"):  # what is named runs
        return
    stay = chosen(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in stay])
    items[:] = [item for item in items if item in stay]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="of tests that are many alike, all and not some")
    parser.addoption("--all-tiles", action="store_true", help="compile every row of the tile tables in every variant")
