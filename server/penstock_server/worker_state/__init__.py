"""What a worker process shows without a message: its activity page, its stacks, its caches, and how it ended.

The worker writes these, and the daemon reads them. Neither side is imported here. Begin with `activity.py`.
"""
