"""Which calls share prefixes: what the host decides from shapes and options alone. Imports no Triton."""

from __future__ import annotations

from torch import Tensor

from ....kv_latent import is_latent
from ....kv_request import KvRequest
from ....mods.builtin import softcap

MAX_BATCH = 2048  # sequences that are divided into groups
MAX_SOFTCAP = 2.0**16  # larger ones are "large scores", whose partial results are not (out, lse)


def shares_prefix(request: KvRequest) -> bool:
    """Whether the kernels read shared prefixes once. Not if rows that share keys have different scores or masks for
    them, nor if results must not depend on the batch."""
    call, places, spec = request.call, request.cache_index, request.call.spec
    if request.shared_prefix is None or places.table is None or places.by_token or is_latent(request):
        return False
    if places.starts is not None or spec.before is not None or spec.mask_mod is not None or spec.max_logit:
        return False
    if request.split is not None or not 1 < places.batch <= MAX_BATCH or not call.q.numel():
        return False
    scales = (request.k_scale, request.v_scale)
    if any(isinstance(x, Tensor) and x.dim() == 2 for x in scales):
        return False
    is_softcap = spec.score_mod == softcap(1.0).key and spec.score_numbers[0] <= MAX_SOFTCAP
    return spec.score_mod is None or is_softcap
