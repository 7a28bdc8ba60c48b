"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("penstock")
except PackageNotFoundError:  # a source tree on the path
    __version__ = "0+unknown"
