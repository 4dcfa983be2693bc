"""Drawings in SVG: what each rank holds, the paged cache, a batch over time."""
