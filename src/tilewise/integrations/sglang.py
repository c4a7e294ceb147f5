"""A backend for SGLang: `--attention-backend tilewise`. SGLang finds it where tilewise is installed.

An entry point of the group `sglang.srt.plugins` names `register`; the backend itself is imported when a model is loaded
with it. Written for the interface of SGLang 0.5.15 to 0.5.23; with others it warns.
"""

from __future__ import annotations

from typing import Any

from ..validation.versions import check_version

NAME = "tilewise"
TESTED = ((0, 5, 15), (0, 5, 23))


def register() -> None:
    """Register the backend "tilewise" with SGLang. SGLang calls it at its start, through the entry point."""
    import sglang
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    check_version("sglang", sglang.__version__, *TESTED)
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)


def create(runner: Any) -> Any:
    """The backend of a model runner.

    Args:
        runner: SGLang's ModelRunner.

    Returns:
        An AttentionBackend.
    """
    from ..adapters.sglang import TilewiseBackend

    return TilewiseBackend(runner)
