"""What the accounts use: answers in flight, and tokens a minute. The core keeps it, so it holds for all doors together.

Tokens fill a bucket of a minute's worth, which leaks evenly. A request needs a bucket that is not empty; its prompt is
taken from it at once, and the tokens of its answer at the end, so the bucket may owe some. What an account uses in the
long run is what it may use, and no request has to say beforehand how much it will need.
"""

from dataclasses import dataclass

from protocol.clock import Clock
from protocol.errors import Overloaded
from router.admission import Account

MINUTE_S = 60.0
IN_FLIGHT_RETRY_S = 1.0


@dataclass(slots=True)
class _Use:
    in_flight: int
    tokens: float
    """What is left in the bucket, at `at`."""
    at: float


class Quotas:
    """`begin` follows `check`, `end` follows each `begin` once. Limits are those of the latest request."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def check(self, account: Account | None, num_answers: int) -> None:
        """Raises Overloaded if the account may not have so many answers more now."""
        if account is None:
            return
        use = self._use(account)
        most = account.max_in_flight
        if most is not None and use.in_flight + num_answers > most:
            raise Overloaded(
                f"max_in_flight: {use.in_flight} + {num_answers} answers at once, {account.name} may have {most}",
                retry_after_s=IN_FLIGHT_RETRY_S,
            )
        rate = account.tokens_per_minute
        if rate is not None and use.tokens <= 0:
            raise Overloaded(
                f"tokens_per_minute: {account.name} has used {rate}", retry_after_s=(1 - use.tokens) * MINUTE_S / rate
            )

    def begin(self, account: Account | None, num_prompt_tokens: int) -> None:
        if account is not None:
            use = self._use(account)
            use.in_flight += 1
            _take(use, account, num_prompt_tokens)

    def end(self, account: Account | None, num_answer_tokens: int) -> None:
        if account is None:
            return
        use = self._use(account)
        use.in_flight -= 1
        _take(use, account, num_answer_tokens)
        if not use.in_flight and (account.tokens_per_minute is None or use.tokens >= account.tokens_per_minute):
            del self._uses[account.name]

    def _use(self, account: Account) -> _Use:
        now, rate = self._clock(), float(account.tokens_per_minute or 0)
        use = self._uses.setdefault(account.name, _Use(0, rate, now))
        use.tokens = min(rate, use.tokens + (now - use.at) * rate / MINUTE_S)
        use.at = now
        return use


def _take(use: _Use, account: Account, num_tokens: int) -> None:
    """An account without a rate owes nothing, should it get one later."""
    if account.tokens_per_minute is not None:
        use.tokens -= num_tokens
