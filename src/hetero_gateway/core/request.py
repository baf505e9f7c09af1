"""What the scheduler needs to know of a request."""

from __future__ import annotations

from typing import Any

from hetero_gateway.core.types import (
    DEFAULT_CLASS,
    MOST_SEQUENCES,
    MOST_TOKENS,
    InstanceId,
    PrefixKeys,
)

_FIELDS = (
    "model", "prompt_tokens", "predicted_output_tokens", "sequences", "streams", "client",
    "priority", "prefix", "only", "certain_tokens", "session", "request_class", "whole",
)  # fmt: skip


class Request:
    """What the scheduler needs to know of a request.

    Nobody changes one: ``replace`` makes another.

    Args:
        model: the name that the client asked for.
        prompt_tokens: I_r, tokens of one sequence's prompt (estimated, at least 1).
        predicted_output_tokens: Õ_r, predicted output tokens of one sequence (0 for embeddings).
        sequences: how many sequences the engine will run: prompts × ``n``.
        streams: whether its first token will be seen when it is made.
        client: whose it is: as whom it counts where clients have shares; "" where nobody asks.
        priority: a higher one goes first, for queue disciplines that look at it.
        prefix: keys of its prompt's beginnings, for what knows of prefix caches; None: not wanted.
        only: the one instance that can take it (what it continues lives there); None: any.
        certain_tokens: of one sequence, what it needs whatever the estimates say: it is refused for
            no more than these; None: for all of its tokens, as where nothing is estimated.
        session: which conversation or user it belongs to, as a hash of 64 bits; None: not known.
        request_class: which class of a queue of classes it stands in, by name.
        whole: one instance has to do all of it, its prompt and its answer.
    """

    __slots__ = _FIELDS

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        predicted_output_tokens: float,
        sequences: int = 1,
        streams: bool = True,
        client: str = "",
        priority: int = 0,
        prefix: PrefixKeys | None = None,
        only: InstanceId | None = None,
        certain_tokens: int | None = None,
        session: int | None = None,
        request_class: str = DEFAULT_CLASS,
        whole: bool = False,
    ) -> None:
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.predicted_output_tokens = predicted_output_tokens
        self.sequences = sequences
        self.streams = streams
        self.client = client
        self.priority = priority
        self.prefix = prefix
        self.only = only
        self.certain_tokens = certain_tokens
        self.session = session
        self.request_class = request_class
        self.whole = whole

    def replace(self, **changes: Any) -> Request:
        """Another one, with these fields changed."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return Request(**(fields | changes))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in _FIELDS)
        return f"Request({fields})"

    @property
    def kv_tokens(self) -> int:
        """Tokens that the request will hold in the KV cache when it is finished."""
        return self.sequences * (self.prompt_tokens + round(self.predicted_output_tokens))

    def what_is_wrong(self) -> str:
        """Which number is negative, not finite or absurd; "" where none is."""
        for name, low, high in (
            ("prompt_tokens", 0, MOST_TOKENS),
            ("predicted_output_tokens", 0, MOST_TOKENS),
            ("sequences", 1, MOST_SEQUENCES),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                # A number of many digits cannot be printed, and would help nobody.
                shown = value if -MOST_TOKENS <= value <= MOST_TOKENS else "out of all bounds"
                return f"a request's {name} must be within {low} and {high}, and is {shown}"
        return ""
