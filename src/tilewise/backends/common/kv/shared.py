"""Which calls share prefixes: what the host decides from shapes and options alone. Imports no Triton."""

from __future__ import annotations

from torch import Tensor

from ....kv_formats import is_latent
from ....kv_request import KvRequest
from ....mods.builtin import softcap

MAX_BATCH = 2048  # sequences that are divided into groups
# Found prefixes are shared from so many keys on, and if that saves so many bytes: what is read again comes from the L2
# cache in part, and two launches take longer than one (H200: 62 MB saved 0.94 of the speed, 126 MB 1.11).
MIN_SHARED = 256
MIN_SAVED = 96 << 20
MAX_SOFTCAP = 2.0**16  # larger ones are "large scores", whose partial results are not (out, lse)


def bytes_of_key(request: KvRequest) -> int:
    """Bytes of a token in both caches."""
    return sum(x.shape[2] * x.shape[3] * x.element_size() for x in (request.dense.k, request.dense.v))


def shares_prefix(request: KvRequest) -> bool:
    """Whether the kernels read shared prefixes once. Not if rows that share keys have different scores or masks for
    them, nor if results must not depend on the batch."""
    dense, places, spec = request.dense, request.places, request.dense.spec
    if request.shared_prefix is None or places.table is None or places.by_token or is_latent(request):
        return False
    if places.starts is not None or spec.before is not None or spec.mask_mod is not None or spec.max_logit:
        return False
    if request.split is not None or not 1 < places.batch <= MAX_BATCH or not dense.q.numel():
        return False
    most = (places.batch - 1) * places.capacity(dense.k) * bytes_of_key(request)
    if not isinstance(request.shared_prefix, Tensor) and most < MIN_SAVED:
        return False
    scales = (request.k_scale, request.v_scale)
    if any(isinstance(x, Tensor) and x.dim() == 2 for x in scales):
        return False
    is_softcap = spec.score_mod == softcap(1.0).key and spec.score_numbers[0] <= MAX_SOFTCAP
    return spec.score_mod is None or is_softcap
