"""Files of JSON lines: an object on each line."""
