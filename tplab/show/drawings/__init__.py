"""Drawings in SVG: what each rank holds, and where it stands."""
