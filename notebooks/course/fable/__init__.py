"""The fables: stories that test memory, and the small model trained on them that is embedded here.

``stories`` writes them, ``default_prompt`` is the opening the lab uses where nothing else is asked for,
``CHECKPOINT`` is the model's folder. ``course.fable.recall`` measures how well a model remembers, and
``course.fable.train`` makes the checkpoint.
"""

from course.fable.grammar import Reference, Story, default_story, stories
from tplab.checkpoint.names import EMBEDDED

CHECKPOINT = EMBEDDED["fable"]

__all__ = ["CHECKPOINT", "Reference", "Story", "default_story", "stories"]
