"""A backend for vLLM: `vllm serve MODEL --attention-backend CUSTOM`. vLLM finds it where tilewise is installed.

An entry point of the group `vllm.general_plugins` names `register`; the backend itself is imported when vLLM asks for
it. Written for the interface of vLLM 0.23 (whose cache has five axes) to 0.32 (four); with others it warns.
"""

from __future__ import annotations

from ..validation.versions import check_version

TESTED = ((0, 23), (0, 32))
PATH = "tilewise.adapters.vllm.TilewiseBackend"


def register() -> None:
    """Register tilewise as vLLM's backend CUSTOM, unless another plugin has. vLLM calls it through the entry point."""
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        check_version("vllm", vllm.__version__, *TESTED)
        register_backend(custom, PATH)
