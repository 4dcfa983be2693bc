"""The base class of every error that a user of tplab can cause and correct."""


class TplabError(Exception):
    """What the user asked for cannot be done; the message says what was wrong, where, and which values would work.

    The command line prints it as one line and exits with 2. Each room has its own subclass
    (``RankError``, ``CheckpointError``, ``ShardPlanError``, …).
    """
