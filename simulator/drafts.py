"""Drafts of a simulated run, where no answer has a text that could be guessed."""

import random

import numpy as np

from engine.runners.arithmetic_model import expected_tokens
from protocol.messages import RequestKey
from simulator.scenario import Client


class HalfRight:
    """Drafts for answers that never repeat themselves: each is the right next token or, with probability
    1/2, a wrong one.
    """

    def __init__(self, seed: int, clients: dict[str, Client]) -> None:
        self._clients = clients
        self._random = random.Random(f"guesses {seed}")

    def propose(self, key: RequestKey, token_ids: np.ndarray, max_num_drafts: int) -> list[int]:
        request = self._clients[key.request_id].request
        num_prompt, seed = len(request.prompt_token_ids), request.sampling.seed or 0
        answer = expected_tokens(token_ids[:num_prompt], len(token_ids) - num_prompt + max_num_drafts, seed=seed)
        return [token + (self._random.random() < 0.5) for token in answer[len(token_ids) - num_prompt :]]
