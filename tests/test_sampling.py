"""Counting what lies beyond the nucleus: the bound holds, and a truncation that others miss shows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import toy
from rollproof import Outcome, Settings, check_rollout
from rollproof.judge import count_log_bound
from rollproof.oracle import BASE, Oracle, Sample
from test_runner import _entered


@pytest.mark.parametrize(("n", "p"), [(200, 0.05), (1000, 0.03), (40, 0.5)])
def test_the_bound_is_never_below_the_exact_probability(n: int, p: float):
    exact = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    chances = torch.full((n,), p)
    for count in (0, 1, n // 50, n // 20, n // 10, n // 2, n):
        tail = min(sum(exact[: count + 1]), sum(exact[count:]))
        assert tail < 1e-290 or count_log_bound(chances, count) >= math.log(tail) - 1e-6
    assert count_log_bound(chances, round(n * p)) == 0.0


def test_tails_are_what_the_distribution_says(base_oracle: Oracle):
    sample = Sample(tuple(range(9)), (3, 5, 8), 2.0)
    ((chances, beyond),) = base_oracle.tails(BASE, [sample], 0.9)
    with torch.inference_mode():
        logits = base_oracle._base(torch.tensor([[*sample.prompt, *sample.tokens]])).logits[0, 8:-1]
    for q, token, chance, found in zip((logits / 2).softmax(-1), sample.tokens, chances, beyond, strict=True):
        likelier = q[q > q[token]].sum()
        assert bool(found) == bool(likelier >= 0.9)
        kept = [v for v in range(len(q)) if q[q > q[v]].sum() < 0.9]
        assert chance == pytest.approx(1 - q[kept].sum().item(), abs=1e-4)


class Nucleus(toy.Toy):
    """Samples from the nucleus of 0.95, with logprobs of the whole distribution."""

    async def generate(self, request):
        if request.temperature == 0:
            return await super().generate(request)
        version = self._version if request.adapter else BASE
        generator, tokens = torch.Generator().manual_seed(request.seed or 0), []
        for _ in range(request.max_tokens):
            ids = torch.tensor([[*request.prompt_token_ids, *tokens]])
            with torch.inference_mode():
                q = (self._model._model(version)(ids).logits[0, -1] / request.temperature).softmax(-1)
            ranked, order = q.sort(descending=True)
            ranked[ranked.cumsum(-1) - ranked >= 0.95] = 0
            tokens.append(int(order[torch.multinomial(ranked, 1, generator=generator)]))
        score = self._model.score(version, [Sample(request.prompt_token_ids, tuple(tokens), 1.0)])[0]
        return toy.Completion(tuple(tokens), tuple(score.logprobs.tolist()))


async def test_a_truncation_is_caught_by_its_tail_alone(model_path: Path):
    settings = Settings(model=str(model_path), only=("SYNC-021",))
    report = await check_rollout(lambda spec: _entered(Nucleus(spec)), settings)
    told = {result.clause: result.message for result in report.results if result.outcome != Outcome.PASS}
    assert set(told) == {"SYNC-021"}, told
    assert "0 of" in told["SYNC-021"]
