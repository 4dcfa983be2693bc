"""The fables: stories that test memory, and the small model trained on them that is embedded here.

``stories`` writes them, ``default_prompt`` is the opening the lab uses where nothing else is asked for,
``CHECKPOINT`` is the model's folder. ``tplab.fable.recall`` measures how well a model remembers, and
``tplab.fable.train`` makes the checkpoint.
"""

from pathlib import Path

from tplab.fable.grammar import FableError, Reference, Story, default_prompt, default_story, stories

CHECKPOINT = Path(__file__).parent / "checkpoint"

__all__ = ["CHECKPOINT", "FableError", "Reference", "Story", "default_prompt", "default_story", "stories"]
