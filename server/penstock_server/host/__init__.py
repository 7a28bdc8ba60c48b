"""One machine's part: the arena, the worker processes, and the ways out to consumers."""
