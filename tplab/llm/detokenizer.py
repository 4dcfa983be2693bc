"""From tokens to text, in whole characters; finds stop texts."""


class Detokenizer:
    """The text of one output, token by token.

    A token may be a part of a character (byte-level tokenizers cut emoji and accented letters), and how a token is
    written may depend on the one before it. So the last few tokens are decoded together, and what ends in an
    unfinished character waits for the next token (the method of Hugging Face's text-generation-inference).

    ``prompt_token_ids``: what stands before; only its end matters. ``stop``: texts that end the output.
    """

    CONTEXT = 5  # tokens of the prompt that decide how the first new token is written

    def __init__(self, tokenizer, prompt_token_ids: list[int], stop: tuple[str, ...] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.token_ids = list(prompt_token_ids[-self.CONTEXT:])
        self.begin, self.done = 0, len(self.token_ids)
        self.text = ""
        self.streamed = 0

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def add(self, token: int) -> str | None:
        """Add a token; returns the stop text that it completes (and cuts that off), else None."""
        self.token_ids.append(token)
        before = self._decode(self.token_ids[self.begin:self.done])
        now = self._decode(self.token_ids[self.begin:])
        if now.endswith("\N{REPLACEMENT CHARACTER}") or len(now) <= len(before):
            return None
        self.text += now[len(before):]
        self.begin, self.done = self.done, len(self.token_ids)
        return self._cut(len(now) - len(before))

    def finish(self) -> str | None:
        """No token follows: an unfinished character is written as it is. Returns a stop text like :meth:`add`."""
        before = self._decode(self.token_ids[self.begin:self.done])
        rest = self._decode(self.token_ids[self.begin:])[len(before):]
        self.text += rest
        self.begin = self.done = len(self.token_ids)
        return self._cut(len(rest))

    def _cut(self, new: int) -> str | None:
        found = None
        for stop in self.stop:
            at = self.text.find(stop, max(0, len(self.text) - new - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return None
        self.text = self.text[:found[0]]
        return found[1]

    def take_certain(self, finished: bool) -> str:
        """The text that has not been taken yet and can no longer become part of a stop text."""
        end = len(self.text)
        if not finished:
            for stop in self.stop:
                held = next((n for n in range(min(len(stop) - 1, len(self.text)), 0, -1)
                             if self.text.endswith(stop[:n])), 0)
                end = min(end, len(self.text) - held)
        piece, self.streamed = self.text[self.streamed:end], max(self.streamed, end)
        return piece
