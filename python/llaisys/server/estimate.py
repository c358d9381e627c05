"""The size of an answer, estimated before its request is admitted.

Counted is what is certain: the prompt's part, and tokens that the request insists on (`min_tokens`, with
`ignore_eos` also `max_tokens`). What the model adds is counted while it is generated (`ResponseBytes`):
most answers end long before their bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from llaisys.errors import RejectedError
from llaisys.server.protocol import AnswerOptions
from llaisys.types import SamplingParams

# Bytes of JSON where a token has 4 characters and a logprob 18 digits.
TEXT_BYTES = 4
ID_BYTES = 6
# `" the":-12.345678329467773,`, and for each token its name, logprob and offset.
CANDIDATE_BYTES, TOKEN_BYTES = 27, 35
# `{"token":" the","logprob":-12.345678329467773,"bytes":[32,116,104,101]},`
CHAT_CANDIDATE_BYTES, CHAT_TOKEN_BYTES = 72, 19
# `"12345":{"logprob":-12.345678329467773,"rank":12345,"decoded_token":" the"},`
PROMPT_CANDIDATE_BYTES = 77
FLOAT_BYTES, BASE64_FLOAT_BYTES = 21, 16 / 3


def check_size(
    n_most: int, n_tokens: Sequence[int], params: SamplingParams, options: AnswerOptions, *, is_chat: bool
) -> None:
    """Raises RejectedError for an answer that would have more than `n_most` bytes.

    `n_tokens`: of each prompt; 0 for one that the answer does not show. Of a stream the prompt's part alone
    counts, which comes at once.
    """
    n_top = options.n_top
    if n_top is None:
        each = 0
    elif is_chat:
        each = CHAT_TOKEN_BYTES + CHAT_CANDIDATE_BYTES * (n_top + 1)
    else:
        each = TOKEN_BYTES + CANDIDATE_BYTES * (n_top + 1)
    ids = ID_BYTES if options.token_ids else 0
    echoed = TEXT_BYTES + (0 if is_chat else each) if options.echo else 0
    scored = PROMPT_CANDIDATE_BYTES * ((params.prompt_logprobs or 0) + 1) if options.prompt_logprobs else 0
    n_copies = 1 if is_chat else params.n  # each choice of a completion shows them
    n_bytes = sum(n_tokens) * (params.n * echoed + n_copies * (scored + ids))
    if not options.stream:
        n_certain = (params.max_tokens or 0) if params.ignore_eos else params.min_tokens
        n_bytes += n_certain * params.n * len(n_tokens) * (TEXT_BYTES + each + ids)
    if n_bytes > n_most:
        of_prompt = params.prompt_logprobs if options.prompt_logprobs else None
        asked = {"n": params.n, "logprobs": n_top, "prompt_logprobs": of_prompt}
        shown = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
        raise RejectedError(
            f"the answer would have about {n_bytes} bytes ({len(n_tokens)} prompts, {sum(n_tokens)} tokens, "
            f"{shown}), at most {n_most} are given (max_response_bytes): send fewer prompts in one request, "
            "or ask for fewer choices, tokens or logprobs",
            param="n" if n_top is None and not scored else "prompt_logprobs" if scored else "logprobs",
        )


def check_embeddings_size(n_most: int, n_inputs: int, d_model: int, *, as_base64: bool) -> None:
    """Raises RejectedError for a list of embeddings that would have more than `n_most` bytes."""
    n_bytes = int(n_inputs * d_model * (BASE64_FLOAT_BYTES if as_base64 else FLOAT_BYTES))
    if n_bytes > n_most:
        raise RejectedError(
            f"the answer would have about {n_bytes} bytes ({n_inputs} vectors of {d_model} numbers), at most "
            f"{n_most} are given (max_response_bytes): send fewer inputs in one request"
            + ("" if as_base64 else ", or encoding_format base64"),
            param="input",
        )
