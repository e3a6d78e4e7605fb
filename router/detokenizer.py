"""The text of one answer while its tokens arrive.

All pieces joined are the text of all tokens. A piece never ends inside a character, and never holds text that may turn
out to be the beginning of a stop string. The amortised cost per token and stop string is constant.
"""

import codecs

from router.tokenizer import Tokenizer, join_bytes


class Detokenizer:
    """Turns the tokens of one answer into text. `stopped` becomes true at the first complete stop string; the text ends
    before it, or with it if `include_stop`. Stop strings that are complete within `min_tokens` tokens are ignored.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_Matcher(text) for text in stop]
        self._held = ""
        self._unfinished = False
        """Whether the bytes so far end inside a character."""
        self._include_stop = include_stop
        self._num_free = min_tokens
        """How many of the next tokens cannot complete a stop string."""
        self.stopped = False

    def push(self, token_ids: list[int]) -> tuple[str, int]:
        """Returns the next piece, which may be empty, and how many of `token_ids` [num_tokens] belong to the answer.
        Only the tokens past a stop string do not.
        """
        if self.stopped:
            return "", 0
        if not self._matchers:
            return self._decode(token_ids), len(token_ids)
        pieces = []
        for i in range(len(token_ids)):
            self._num_free -= 1
            pieces.append(self._match(self._decode(token_ids[i : i + 1])))
            if self.stopped:
                return "".join(pieces), i + 1
        return "".join(pieces), len(token_ids)

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the answer. An unfinished character becomes U+FFFD."""
        if self.stopped:
            return ""
        rest = self._match(self._utf8.decode(b"", True))
        held, self._held = self._held, ""
        return rest if self.stopped else rest + held

    def _decode(self, token_ids: list[int]) -> str:
        data = join_bytes(self._token_bytes, token_ids)
        if not self._unfinished:
            try:
                return data.decode()  # the usual case, and a fraction of what the incremental decoder takes
            except UnicodeDecodeError:
                pass
        text = self._utf8.decode(data)
        self._unfinished = bool(self._utf8.getstate()[0])
        return text

    def _match(self, text: str) -> str:
        """Appends decoded text. Returns the text that is certain by now."""
        known = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            complete = [matcher for matcher in self._matchers if matcher.push(character)]
            if complete and self._num_free < 0:
                self.stopped, self._held = True, ""
                return known[: end if self._include_stop else end - max(len(matcher.text) for matcher in complete)]
            for matcher in complete:
                matcher.go_on()
        certain = len(known) - max((matcher.num_matched for matcher in self._matchers), default=0)
        self._held = known[certain:]
        return known[:certain]


class _Matcher:
    """Tracks how much of a stop string the text ends with (algorithm of Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = [0]
        """[len(text)]: entry i is the length of the longest proper prefix of text[: i + 1] that is also its suffix."""
        for character in text[1:]:
            self._borders.append(self._extend(self._borders[-1], character))

    def push(self, character: str) -> bool:
        """Returns True when `text` is complete. After that only `go_on` makes the matcher usable again."""
        self.num_matched = self._extend(self.num_matched, character)
        return self.num_matched == len(self.text)

    def go_on(self) -> None:
        """Ignores the match that was completed. The next one may begin inside it."""
        self.num_matched = self._borders[-1]

    def _extend(self, num_matched: int, character: str) -> int:
        while num_matched and self.text[num_matched] != character:
            num_matched = self._borders[num_matched - 1]
        return num_matched + (self.text[num_matched] == character)
