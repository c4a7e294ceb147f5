"""The derivation, in torch only, rung by rung; its last rung is the CPU backend and the oracle of every kernel."""

from tilewise.reference.tiled import backward, forward

__all__ = ["backward", "forward"]
