"""The status of a daemon, as one document; and what each worker and consumer waits for.

It only reads. Begin with `current_status.py`.
"""
