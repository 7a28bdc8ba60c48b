"""Folders of images, with a subfolder for each class, as Keras and torchvision read them. Begin with `format.py`."""
