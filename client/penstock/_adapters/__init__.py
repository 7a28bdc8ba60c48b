"""What users hold: a connection, and the stream as NumPy arrays, or for TensorFlow, Keras and torch.

Each library is imported by one file. Begin with `connection.py`.
"""
