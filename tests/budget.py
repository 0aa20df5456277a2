"""Count what the suite costs: compilations and CPU seconds, over all workers, held against a limit.

Wall time varies with the machine's neighbours, so it is printed and never judged. A compilation is a program that JAX
built or read from the cache on disk: the number is the same whether the cache is empty or not. CPU seconds include
collecting and what tests start as processes of their own, whose compilations are not counted. A slower machine is
allowed more of them: the limit grows with the time that it takes for a fixed piece of work.
"""

import os
import time
from functools import cache
from typing import Any

import jax.monitoring
import pytest

# 25 % above what was measured with an empty cache. Raise one only together with a reason in the commit.
MOST_COMPILATIONS = 6_120
MOST_CPU_SECONDS = 2_170
YARDSTICK_SECONDS = 0.14  # of `yardstick` on the machine where the CPU seconds were measured

COMPILED = "/jax/core/compile/backend_compile_duration"
KEY = "priory_cost"


class Budget:
    """Adds up the costs of this process and of its workers."""

    def __init__(self) -> None:
        self.compilations = 0
        self.of_workers: list[dict[str, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_: Any) -> None:
        self.compilations += event == COMPILED

    def own(self) -> dict[str, float]:
        """Return the cost of this process and of those that it started and waited for."""
        used = os.times()
        # The controller's children are the workers, which report for themselves.
        children = used.children_user + used.children_system if not self.of_workers else 0.0
        return {"compilations": self.compilations, "cpu": used.user + used.system + children}

    def total(self) -> dict[str, float]:
        """Return the cost of all processes."""
        costs = [self.own(), *self.of_workers]
        return {name: sum(cost[name] for cost in costs) for name in costs[0]}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand a worker's cost to the controller, or judge the sum."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[KEY] = self.own()
        elif session.config.getoption("budget") and self.exceeded() and session.exitstatus == 0:
            session.exitstatus = 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take a worker's cost."""
        cost = getattr(node, "workeroutput", {}).get(KEY)
        if cost is not None:
            self.of_workers.append(cost)

    def exceeded(self) -> list[str]:
        """Return a sentence for each limit that the suite exceeds."""
        total, cpu_seconds = self.total(), float(MOST_CPU_SECONDS)
        if total["cpu"] > cpu_seconds:
            cpu_seconds *= max(1.0, yardstick() / YARDSTICK_SECONDS)
        limits = {"compilations": ("compilations", MOST_COMPILATIONS), "cpu": ("CPU seconds", cpu_seconds)}
        return [
            f"{total[name]:,.0f} {what} exceed the limit of {most:,.0f}; share programs, see docs/testing.md."
            for name, (what, most) in limits.items()
            if total[name] > most
        ]

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Print the cost, and what exceeds its limit."""
        total = self.total()
        terminalreporter.write_line(f"{total['compilations']:,.0f} compilations, {total['cpu']:,.0f} CPU seconds")
        if config.getoption("budget"):
            for sentence in self.exceeded():
                terminalreporter.write_line(sentence, red=True)


@cache
def yardstick() -> float:
    """Return the CPU seconds of a fixed piece of work on this machine, the least of five."""

    def once() -> float:
        start = time.process_time()
        sum(number * number for number in range(2_000_000))
        return time.process_time() - start

    return min(once() for _ in range(5))
