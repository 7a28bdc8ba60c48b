"""An open stream: connecting and reconnecting, the receiver thread, and the hand-off to the consumer's thread.

It knows neither TensorFlow nor Keras nor torch. Begin with `stream_handle.py`.
"""
