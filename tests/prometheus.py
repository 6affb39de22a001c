"""Reads what a process shows to Prometheus, as Prometheus would."""

from __future__ import annotations

import http.client
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """One answer of `/metrics`.

    Attributes:
        kinds: of each metric, by its name as it is scraped, without the suffixes of a histogram.
        samples: every line, as name and labels, with its value.
    """

    def __init__(self, text: str) -> None:
        self.kinds: dict[str, str] = {}
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            self.kinds[family.name + ("_total" if family.type == "counter" else "")] = family.type
            for sample in family.samples:
                self.samples[sample.name, frozenset(sample.labels.items())] = sample.value

    def of(self, name: str, /, **labels: str) -> float:
        """Sum over the series of a name that have these labels; there must be at least one."""
        found = self.matching(name, labels)
        assert found, f"no series {name} {labels}"
        return sum(found)

    def has(self, name: str, /, **labels: str) -> bool:
        return bool(self.matching(name, labels))

    def matching(self, name: str, labels: Mapping[str, str]) -> list[float]:
        return [v for (n, of), v in self.samples.items() if n == name and labels.items() <= dict(of).items()]

    @property
    def counters(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Every line that may only grow."""
        growing = ("_total", "_count", "_sum", "_bucket")
        return {key: value for key, value in self.samples.items() if key[0].endswith(growing)}


def scrape(port: int, host: str = "127.0.0.1", path: str = "/metrics") -> Scrape:
    """Asks a process; not to be called on its own event loop."""
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    assert response.status == 200, body
    return Scrape(body.decode())
