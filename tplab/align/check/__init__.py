"""Recorded engines: the folder read, its names and layouts found."""
