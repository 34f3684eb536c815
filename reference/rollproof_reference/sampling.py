"""Requests as vLLM's sampling parameters, and vLLM's outputs as the protocol's completions.

Nothing here knows an adapter, an update or a running engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rollproof.protocol import Completion, GenerateRequest

if TYPE_CHECKING:
    from vllm import RequestOutput

ROUTES = ("default", "stream")
"""The ways to ask: for the finished completion at once, or token by token."""


def check_request(request: GenerateRequest, max_model_len: int) -> None:
    """Raise ValueError for a prompt that doesn't fit, or a route that isn't there."""
    room = max_model_len - len(request.prompt_token_ids)
    if not request.prompt_token_ids or not 1 <= request.max_tokens <= room:
        raise ValueError(
            f"a prompt of {len(request.prompt_token_ids)} tokens and max_tokens={request.max_tokens} "
            f"were given; both have to be at least 1 and together at most {max_model_len}"
        )
    if request.route not in ROUTES:
        raise ValueError(f"route is {request.route!r}; allowed: {', '.join(ROUTES)}")


def sampling_params(request: GenerateRequest, n: int = 1) -> SamplingParams:
    """How vLLM has to sample ``n`` completions of the request."""
    stream = request.route == "stream"
    return SamplingParams(
        n=n,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> SamplingParams:
    """How vLLM has to score a prompt. It reads no KV of earlier requests for such a one."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completions(outputs: Sequence[RequestOutput], version: int | None) -> list[Completion]:
    """What came for a request, in one piece or in many, as one completion a sample.

    ``version`` served all of it; None where that isn't known, or it was the base model.
    """
    pieces: dict[int, list[Any]] = {}
    for output in outputs:
        for sample in output.outputs:
            pieces.setdefault(sample.index, []).append(sample)
    return [_joined(pieces[index], outputs[0].num_cached_tokens, version) for index in sorted(pieces)]


def _joined(pieces: Sequence[Any], num_cached_tokens: int | None, version: int | None) -> Completion:
    steps = [
        (token, step[token].logprob)
        for piece in pieces
        for token, step in zip(piece.token_ids, piece.logprobs or (), strict=True)
    ]
    return Completion(
        token_ids=tuple(token for token, _ in steps),
        logprobs=tuple(logprob for _, logprob in steps),
        finish_reason=str(pieces[-1].finish_reason),
        num_cached_tokens=num_cached_tokens,
        version_spans=None if version is None else ((0, version),),
    )


def prompt_scores(output: RequestOutput) -> list[float]:
    """The logprob of each prompt token but the first."""
    tokens, scores = output.prompt_token_ids or [], output.prompt_logprobs or []
    return [float(step[token].logprob) for token, step in zip(tokens[1:], scores[1:], strict=True)]
