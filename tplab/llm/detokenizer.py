"""From tokens to text, in whole characters; finds stop texts."""

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of one output, token by token.

    ``tokenizer``: a fast one of transformers. ``prompt_token_ids``: what stands before; only its end matters. ``stop``:
    texts that end the output.
    """

    CONTEXT = 5  # tokens of the prompt that decide how the first new token is written

    def __init__(self, tokenizer, prompt_token_ids: list[int], stop: tuple[str, ...] = ()):
        self.tokenizer, self.stop = tokenizer.backend_tokenizer, stop
        self.context = list(prompt_token_ids[-self.CONTEXT:])
        self.token_ids: list[int] = []
        self.stream = DecodeStream(self.context, skip_special_tokens=True)
        self.text = ""
        self.streamed = 0

    def add(self, token: int) -> str | None:
        """Add a token; returns the stop text that it completes (and cuts that off), else None."""
        self.token_ids.append(token)
        try:
            piece = self.stream.step(self.tokenizer, token)
        except Exception as error:  # tokenizers has no type of its own for it
            if "Invalid prefix" not in str(error):
                raise
            # Bytes that are no character have changed how those before them are written: begin again, as vLLM does.
            self.stream = DecodeStream(skip_special_tokens=True)
            piece = self.stream.step(self.tokenizer, token)
        return self._extend(piece or "")

    def finish(self) -> str | None:
        """No token follows: an unfinished character is written as it is. Returns a stop text like :meth:`add`."""
        before, whole = (self.tokenizer.decode(token_ids, skip_special_tokens=True)
                         for token_ids in (self.context, self.context + self.token_ids))
        written = before + self.text
        return self._extend(whole[len(written):] if whole.startswith(written) else "")

    def _extend(self, piece: str) -> str | None:
        self.text += piece
        places = {stop: at for stop in self.stop
                  if (at := self.text.find(stop, max(0, len(self.text) - len(piece) - len(stop) + 1))) >= 0}
        if not places:
            return None
        first = min(places, key=lambda stop: places[stop])
        self.text = self.text[:places[first]]
        return first

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
