"""What this machine has: CPUs, memory and descriptors, also within a container; and what a process starts with.

Nothing here knows Penstock. Begin with `cpus.py`.
"""
