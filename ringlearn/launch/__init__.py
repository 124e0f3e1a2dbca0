"""What this machine can run, and starting it: processes for the ranks of a distributed world."""

from .pool import LaunchError, Pool, launch

__all__ = ["LaunchError", "Pool", "launch"]
