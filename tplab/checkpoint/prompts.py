"""The text that is read where none is given."""

import os

from .names import EMBEDDED

SENTENCE = "The old lighthouse keeper climbed the stairs every evening, because the ships at sea"
# The opening of a story that the embedded models were not trained on: its names must return many tokens later.
STORY = ("Magnus lived by the barn with a blue hound. Not far away, by the tower, lived Elsa, who owned a red kite. "
         "One warm morning, the hound was gone.")


def default_prompt(model) -> str:
    """A prompt for ``model`` (a name, a folder or a Checkpoint): a story's opening for the embedded models, else a
    sentence."""
    return STORY if os.fspath(getattr(model, "name", model)) in EMBEDDED else SENTENCE
