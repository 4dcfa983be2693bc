"""The fables: stories that test memory, and the small model trained on them that is embedded here.

``stories`` writes them, ``CHECKPOINT`` is the model's folder. ``course.fable.recall`` measures how well a model
remembers, and ``course.fable.train`` makes the checkpoint.
"""

from course.fable.grammar import Story, stories
from tplab.checkpoint.names import EMBEDDED

CHECKPOINT = EMBEDDED["fable"]

__all__ = ["CHECKPOINT", "Story", "stories"]
