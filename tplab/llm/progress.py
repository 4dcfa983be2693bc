"""The progress bar of a long generation."""

import time

BAR_AFTER = 2.0  # seconds until a generation counts as long


class Progress:
    """A bar over ``total`` requests. ``wanted``: True: at once; False: never; None: when it takes over two seconds."""

    def __init__(self, total: int, wanted: bool | None):
        self.total, self.wanted, self.bar = total, wanted, None
        self.begin, self.tokens, self.finished = time.perf_counter(), 0, 0

    def __enter__(self):
        return self

    def show(self, tokens: int, finished: int) -> None:
        """Count a step's new tokens and the requests that ended with it."""
        self.tokens += tokens
        self.finished += finished
        late = time.perf_counter() - self.begin > BAR_AFTER
        if self.bar is None and (self.wanted or (self.wanted is None and late)):
            from tqdm.auto import tqdm

            self.bar = tqdm(total=self.total, desc="generate", unit="request", leave=False)
        if self.bar is not None:
            rate = self.tokens / (time.perf_counter() - self.begin)
            self.bar.set_postfix_str(f"{self.tokens} tokens, {rate:.0f} tokens/s", refresh=False)
            self.bar.update(self.finished - self.bar.n)

    def __exit__(self, *exc):
        if self.bar is not None:
            self.bar.close()
