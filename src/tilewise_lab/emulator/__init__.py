"""Gluon kernels on a CPU: every warp partition a thread, every copy late, every race and deadlock an error."""

from .launch import launch
from .machine import DeadlockError, Machine, RaceError

__all__ = ["DeadlockError", "Machine", "RaceError", "launch"]
