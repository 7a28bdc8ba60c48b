"""Arrow files."""
