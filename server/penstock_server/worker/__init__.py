"""The worker process: runs user code and writes batches into the slots that the daemon grants. See __main__.py.

Knows neither other workers nor trainers, and never imports TensorFlow.
"""
