"""Figures on axes, drawn with matplotlib: what was measured, against what."""
