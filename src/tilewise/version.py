"""The version that was installed: pip's metadata, which has it from the git tag."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tilewise")
except PackageNotFoundError:  # sources on the path that were never installed
    __version__ = "0+unknown"
