"""A loop of clients that must never see a failure."""

import threading
import time

import httpx

from patience import eventually


class ClientLoop:
    """Threads that ask one question after another until they are stopped; every answer or failure is kept.

    `exempt` counts failures as exempt while a part that may take requests with it is being killed.
    """

    def __init__(self, url, model, clients=2, max_tokens=8):
        self._url, self._model, self._max_tokens = url, model, max_tokens
        self.answers, self.failures = 0, []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a client never got an answer"

    def _ask(self):
        body = {"model": self._model, "prompt": "One, two, three,", "max_tokens": self._max_tokens, "temperature": 0}
        while not self._stop.is_set():
            try:
                answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=100, trust_env=False)
            except httpx.HTTPError as error:
                self.failures.append(f"{time.strftime('%X')} {type(error).__name__}: {error}")
                continue
            if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0:
                self.answers += 1
            else:
                self.failures.append(f"{time.strftime('%X')} HTTP {answer.status_code}: {answer.text[:200]}")

    def wait_for_answers(self, more, timeout=120.0):
        """Wait until `more` further answers came."""
        goal = self.answers + more
        try:
            eventually(lambda: self.answers >= goal, f"{more} more answers", timeout)
        except AssertionError as late:
            raise AssertionError(f"{late}; {self.answers} of {goal}, failures: {self.failures[-3:]}") from None
