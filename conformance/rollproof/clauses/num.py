"""NUM: every module counts, each with its own scale, and the tensors stay the trainer's."""

from __future__ import annotations

from dataclasses import replace

from ..outcome import FailureError, NotApplicableError, about
from ..protocol import Adapter, Capability, GenerateRequest
from ..scale import ANY, FAULT
from ..session import Session

SCORED = 4


async def each_module(session: Session) -> str:
    """Adapters that live in one kind of module, or in one layer, right after one that is everywhere."""
    layers = session.oracle.layers()
    leaves = sorted({name.rpartition(".")[2] for name in layers})
    for leaf in leaves:
        await session.update()
        await session.serve(session.strong_adapter(target_modules=[leaf]))
        with about(f"an adapter on {leaf} alone"):
            told = await session.claim(True, scale=ANY)
    return f"{', '.join(leaves)}, each alone; last: {told}"


async def each_layer(session: Session) -> str:
    """Adapters in one layer only, by layers_to_transform: the first, the last and one between."""
    count = session.oracle.depth
    chosen = sorted({0, count // 2, count - 1})
    for layer in chosen:
        await session.update()
        await session.serve(session.strong_adapter(layers_to_transform=[layer]))
        with about(f"an adapter on layer {layer} alone"):
            told = await session.claim(True, scale=ANY)
    return f"layers {', '.join(map(str, chosen))} of {count}, each alone; last: {told}"


async def scale(session: Session) -> str:
    """alpha below, at and above the rank, and rsLoRA: every token, and the scale that all show together."""
    for options in ({"lora_alpha": 1}, {"lora_alpha": 8}, {"lora_alpha": 64}, {"use_rslora": True}):
        await session.update(**options)
        with about(f"an adapter of rank 8 with {options}"):
            told = await session.claim(True, scale=FAULT)
    return f"alpha / r of 1/8, 1 and 8, and rsLoRA; last: {told}"


async def ownership(session: Session) -> str:
    """The sender's tensors are not written to, and may be overwritten once the update returned."""
    adapter = session.adapter()
    before = {name: tensor.clone() for name, tensor in adapter.tensors.items()}
    await session.serve(adapter)
    for name, tensor in adapter.tensors.items():
        if not tensor.equal(before[name]):
            raise FailureError(f"update_adapter wrote to the trainer's tensor {name!r}")
        tensor.fill_(0.5)
    told = await session.claim(True)
    return f"unwritten by the update, and overwritten after it: {told}"


async def teacher_forced(session: Session) -> str:
    """Completions scored a second time as part of the prompt, with the adapter and without."""
    await session.update()
    told = [await _scored(session, adapter=True)]
    if session.subject.has(Capability.BASE):
        told.append(await _scored(session, adapter=False))
    return "; the base model: ".join(told)


async def _scored(session: Session, *, adapter: bool) -> str:
    async def attempt(n_tokens: int) -> str:
        exchanges = await session.ask(session.requests(session.prompts(SCORED), n_tokens, adapter=adapter))
        session.verify(exchanges)
        again = []
        for e in exchanges:
            tokens = e.completion.token_ids
            request = GenerateRequest((*e.request.prompt_token_ids, *tokens), 1, adapter=adapter)
            found = await session.subject.prompt_logprobs(request)
            again.append(replace(e, completion=replace(e.completion, logprobs=found[-len(tokens) :])))
        with about(f"prompt_logprobs {'with the adapter' if adapter else 'of the base model'}"):
            return session.verify(again, scale=ANY)

    return await session.grow(attempt)


async def embedding(session: Session) -> str:
    """An adapter on the embedding alone, and the base model beside it."""
    weights = session.oracle.embedding()
    return await _alone(session, next(iter(weights)), session.strong_adapter(weights=weights, embedding=True))


async def head(session: Session) -> str:
    """An adapter on the output layer alone, and the base model beside it."""
    weights = session.oracle.head()
    return await _alone(session, next(iter(weights)), session.strong_adapter(weights=weights))


async def experts(session: Session) -> str:
    """Adapters that live in one expert of every layer, the first and the last, each after another one."""
    weights = session.oracle.experts()
    if not weights:
        raise NotApplicableError("this model has no experts that PEFT can target (target_parameters)")
    count = next(iter(weights.values())).shape[0]
    for expert in (0, count - 1):
        await session.update()
        told = await _alone(session, f"expert {expert}", session.expert_adapter(expert))
    return f"the first and the last of {count} experts, each alone; last: {told}"


async def _alone(session: Session, name: str, adapter: Adapter) -> str:
    # Versions are numbered in the order they are made.
    await session.serve(adapter)
    with about(f"an adapter on {name} alone"):
        told = await session.claim(True, scale=ANY)
        if session.subject.has(Capability.BASE):
            await session.claim(True, False)
    return told
