"""What a client asked, after its dialect's words are gone: the common form of all APIs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlx_cb.errors import InvalidRequest
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.server.tool_choice import ToolChoice
from mlx_cb.text.chat_template import ChatInput

MOST_CHOICES = 128
MOST_EMBEDDINGS = 2048
PromptInput = ChatInput | str | list[int]


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """One client's question.

    Attributes:
        prompts: a chat, or one or more texts or token id lists; every prompt gets `n` answers.
        model: the name the client used, None if it used none.
        tool_choice: tools whose calls are looked for in the answer.
        streams_calls: a tool call's arguments are given on while the model writes them.
        is_embedding: the texts' vectors are wanted, and no text.
        prompt_field: the client's name for the prompts.
        echo: the answer begins with the prompt's own text.
        details: what the dialect needs again when it writes the answer.
    """

    prompts: tuple[PromptInput, ...]
    params: SamplingParams
    n: int = 1
    model: str | None = None
    stream: bool = False
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    streams_calls: bool = False
    is_embedding: bool = False
    prompt_field: str = "prompt"
    echo: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        number = self.n * len(self.prompts)
        if self.is_embedding and number > MOST_EMBEDDINGS:
            raise InvalidRequest(
                f"input must hold at most {MOST_EMBEDDINGS} texts, not {number}", param="input"
            )
        if not self.is_embedding and not 1 <= number <= MOST_CHOICES:
            raise InvalidRequest(
                f"n times the number of prompts must be between 1 and {MOST_CHOICES}, not {number}",
                param="n",
            )
