"""Which versions may have served a request follows from the order of calls alone."""

from __future__ import annotations

from typing import Any

from rollproof.candidates import BASE
from rollproof.history import Exchange, History, Served
from rollproof.protocol import Adapter, Completion, GenerateRequest

REQUEST = GenerateRequest((1, 2, 3), 4)


class Config:
    r = 8
    lora_alpha = 16

    def to_dict(self) -> dict[str, Any]:
        return {}


def version(number: int) -> Adapter:
    return Adapter(number, Config(), {})  # type: ignore[arg-type]


def ask(history: History, request: GenerateRequest = REQUEST) -> Exchange:
    return history.request_ended(request, history.request_started(request), Completion((1,)))


def update(history: History, number: int, error: Exception | None = None) -> None:
    history.update_ended(history.update_started(version(number)), error)


def test_before_any_update_it_is_the_base_model():
    history = History()
    assert history.served(ask(history)) == Served((BASE,), ())


def test_an_update_that_returned_replaces_all_before_it():
    history = History()
    update(history, 1)
    update(history, 2)
    exchange = ask(history)
    update(history, 3)
    assert history.served(exchange) == Served((2,), ())


def test_an_update_that_raised_replaces_nothing():
    history = History()
    update(history, 1)
    update(history, 2, ValueError("NaN"))
    assert history.served(ask(history)) == Served((1,), ())


def test_an_update_beside_a_request_may_have_served_it():
    history = History()
    update(history, 1)
    started = history.request_started(REQUEST)
    update(history, 2)
    running = history.update_started(version(3))
    exchange = history.request_ended(REQUEST, started, Completion((1,)))
    history.update_ended(running)
    assert history.served(exchange) == Served((1,), (2, 3))


def test_an_update_beside_a_request_that_raised_in_the_end_never_served():
    history = History()
    update(history, 1)
    started = history.request_started(REQUEST)
    update(history, 2, ValueError("NaN"))
    exchange = history.request_ended(REQUEST, started, Completion((1,)))
    assert history.served(exchange) == Served((1,), ())


def test_a_base_request_is_the_base_models_whatever_is_loaded():
    history = History()
    update(history, 1)
    assert history.served(ask(history, GenerateRequest((1,), 4, adapter=False))) == Served((BASE,), ())
