"""Reading a compiler's log: on logs and listings of our own, without a compiler."""

from __future__ import annotations

import pytest

from tilewise.costs import compiled


def test_search_tells_what_is_missing() -> None:
    assert compiled._search(r"Used (\d+) registers", "ptxas info: Used 168 registers, 400 bytes cmem[0]") == "168"
    with pytest.raises(RuntimeError, match="the assembler's log has no"):
        compiled._search(r"Used (\d+) registers", "ptxas fatal")
