"""Drafts without a model (prompt lookup): the tokens that followed when the last tokens were seen before."""

from protocol.arrays import Int32
from protocol.messages import RequestKey


class NGramProposer:
    """Looks for the latest earlier place with the same last `max_num_tokens` tokens, then with fewer tokens, down
    to `min_num_tokens`.

    It keeps nothing between calls: one scan of the known tokens is cheaper than an index of a prompt that is asked a
    few hundred times.
    """

    def __init__(self, *, min_num_tokens: int = 2, max_num_tokens: int = 4, max_num_places: int = 64) -> None:
        """Only the latest `max_num_places` places where the last `min_num_tokens` tokens stand are looked at."""
        self._min, self._max, self._max_num_places = min_num_tokens, max_num_tokens, max_num_places

    def propose(self, key: RequestKey, token_ids: Int32, max_num_drafts: int) -> list[int]:
        """Returns the tokens that followed at that place, at most `max_num_drafts`; none if there is no such place."""
        count = len(token_ids) - self._min
        if max_num_drafts < 1 or count < 1:
            return []
        tail = token_ids[-self._max :].tolist()
        tail.reverse()
        same = token_ids[self._min - 1 : -1] == tail[0]
        for back in range(1, self._min):
            same &= token_ids[self._min - 1 - back : -1 - back] == tail[back]
        places = same.nonzero()[0]
        if not places.size:
            return []
        best = start = 0
        for place in places[: -self._max_num_places - 1 : -1].tolist():
            end = place + self._min  # the tokens that match lie right before it
            before = token_ids[max(end - self._max, 0) : end].tolist()
            length = self._min
            while length < len(before) and length < len(tail) and before[-1 - length] == tail[length]:
                length += 1
            if length > best:
                best, start = length, end
                if best == self._max:
                    break
        drafts: list[int] = token_ids[start : start + max_num_drafts].tolist()
        return drafts
