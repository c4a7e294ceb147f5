"""Other libraries' functions and interfaces, on top of tilewise's public functions: an adapter maps their arguments to
ours. `tilewise.compat` and `tilewise.integrations` are the public names of what is here."""

import sys


def publish(module: str) -> None:
    """Makes what a public module lists in `__all__` its own: help(), pickle and the reference name that module."""
    space = vars(sys.modules[module])
    for name in space["__all__"]:
        space[name].__module__ = module
