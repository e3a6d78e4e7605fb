"""The eight prompts of the demo."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is a user's message for the chat template if `chat` is set, else text to continue."""

    name: str
    text: str
    max_tokens: int
    chat: bool = True


def prompts() -> list[Prompt]:
    """They cover chat, a story, code, several languages and one long prompt."""
    return [
        Prompt("chat", "What is a good way to learn to cook?", 64),
        Prompt("story", "The lighthouse keeper had not seen a ship for forty days. That morning,", 96, chat=False),
        Prompt("code", 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n', 64, chat=False),
        Prompt("long", _logbook() + "\nWhich goods did the ship carry? Answer in one sentence.", 48),
        Prompt("languages", "Say good morning in English, français, español, Deutsch, 日本語 and русский.", 64),
        Prompt("list", "Name five animals that live in the sea.", 48),
        Prompt("letter", "Write a short letter to a friend about the first snow of the year.", 96),
        Prompt("facts", "The capital of France is", 16, chat=False),
    ]


def _logbook() -> str:
    """The text of a ship's log, about 700 tokens long."""
    goods = ("salt", "barrels of tar", "wool", "dried fish", "copper", "candles", "tea")
    winds = ("north", "north-east", "east", "south-west", "west")
    ports = ("Bergen", "Leith", "Ostend", "Cork", "Lisbon", "Cadiz")
    return "Log of the brig Marianne.\n" + "\n".join(
        f"Day {day}: wind from the {winds[day % 5]}, "
        f"{3 + day * 7 % 11} knots. We took on {goods[day % 7]} bound for {ports[day % 6]}."
        for day in range(1, 25)
    )
