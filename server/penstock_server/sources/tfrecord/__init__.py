"""TFRecord files of Examples."""
