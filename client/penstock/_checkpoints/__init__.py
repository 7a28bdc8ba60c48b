"""Saving and continuing a training run with Keras: the stream's position in a checkpoint of the model.

Begin with `resume.py`.
"""
