"""The root of every error that a user of tplab can cause and mend."""


class TplabError(Exception):
    """Something the user asked for cannot be done; the message says what, where and what would work.

    The command line prints it as one line and exits with 2. Each room has its own subclass
    (``RankError``, ``CheckpointError``, ``ShardPlanError``, …).
    """
