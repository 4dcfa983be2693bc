"""Drawings in SVG: who holds what, and where it stands."""
