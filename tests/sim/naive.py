"""A cluster's engine, one step at a time and as plainly as it can be written: the yardstick.

Written from the rules in ``sim/engine.py``'s docstring alone; it shares no code with the kernel.
Every quantity is summed up anew from the sequences at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero_gateway.core.costs.profile import Profile


@dataclass
class Job:
    prompt: int
    output: int
    arrival_s: float
    made: int = 0  # tokens emitted
    computed: int = 0  # of its prefill
    blocks: int = 0
    decoding: bool = False
    preemptions: int = 0
    first_s: float | None = None
    finish_s: float | None = None

    @property
    def to_compute(self) -> int:
        return self.prompt + self.made


def blocks_for(tokens: int) -> int:
    return (tokens + 15) // 16


@dataclass
class NaiveEngine:
    """``slowdowns``: (from when, factor), in order; a step has the factor of its beginning."""

    profile: Profile
    chunked: bool
    max_batched_tokens: int
    slowdowns: list[tuple[float, float]] = field(default_factory=list)

    def run(self, jobs: list[Job]) -> None:
        """Play the jobs, which are sorted by arrival, to their ends."""
        todo, waiting, running = list(jobs), [], []
        total = self.profile.kv_capacity_tokens // 16
        now_s = 0.0
        while todo or waiting or running:
            if not waiting and not running:
                now_s = max(now_s, todo[0].arrival_s)
            while todo and todo[0].arrival_s <= now_s:
                waiting.append(todo.pop(0))
            now_s = self._step(now_s, total, waiting, running)

    def _step(self, now_s: float, total: int, waiting: list[Job], running: list[Job]) -> float:
        prompts: list[tuple[Job, int]] = []
        evicted = False
        if not self.chunked:
            budget = self.max_batched_tokens
            while self._can_admit(total, waiting, running):
                size = self._size(waiting[0])
                if prompts and size > budget:
                    break
                prompts.append((self._admit(waiting, running), size))
                self._scheduled(prompts[-1][0], prompts[-1][0].to_compute)
                budget -= size
        decoders: list[Job] = []
        if self.chunked or not prompts:
            evicted = self._make_room(total, waiting, running)
            decoders = [job for job in running if job.decoding]
            for job in decoders:
                job.blocks = blocks_for(job.to_compute)
        if self.chunked:
            budget = self.max_batched_tokens - len(decoders)
            for job in running:
                if not job.decoding and budget > 0:
                    size = min(budget, job.to_compute - job.computed)
                    prompts.append((job, size))
                    self._scheduled(job, job.computed + size)
                    budget -= size
            while not evicted and budget > 0 and self._can_admit(total, waiting, running):
                size = min(budget, self._size(waiting[0]))
                prompts.append((self._admit(waiting, running), size))
                self._scheduled(prompts[-1][0], prompts[-1][0].computed + size)
                budget -= size
        now_s += self._duration_s(now_s, prompts, decoders)
        for job in decoders:
            self._emit(job, now_s, running)
        for job, size in prompts:
            job.computed += size
            if job.computed == job.to_compute:
                # Who decodes is ordered by when it joined, among the running ones.
                running.remove(job)
                at = len([other for other in running if other.decoding])
                running.insert(at, job)
                job.decoding = True
                self._emit(job, now_s, running)
        return now_s

    def _can_admit(self, total: int, waiting: list[Job], running: list[Job]) -> bool:
        if not waiting or len(running) >= self.profile.max_num_seqs:
            return False
        free = total - sum(job.blocks for job in running)
        watermark = int(0.01 * total) if running else 0
        return free - blocks_for(waiting[0].to_compute) >= watermark

    def _admit(self, waiting: list[Job], running: list[Job]) -> Job:
        job = waiting.pop(0)
        job.computed = 0
        job.blocks = blocks_for(job.to_compute)
        running.append(job)
        return job

    def _make_room(self, total: int, waiting: list[Job], running: list[Job]) -> bool:
        evicted = False
        while (
            sum(blocks_for(job.to_compute) if job.decoding else job.blocks for job in running)
            > total
        ):
            victim = running.pop()
            victim.decoding = False
            victim.blocks = 0
            victim.preemptions += 1
            waiting.insert(0, victim)
            evicted = True
        return evicted

    def _duration_s(
        self, now_s: float, prompts: list[tuple[Job, int]], decoders: list[Job]
    ) -> float:
        c = self.profile.constants
        time_s = 0.0
        if prompts:
            m, n = len(prompts), sum(size for _, size in prompts)
            time_s += c.p1 * n + c.p2 * m + c.p3 * (n / m) + c.p4
            # Every new token attends to what came before it, and to half of its chunk.
            time_s += c.p9 * sum(u * job.computed + u * u / 2 for job, u in prompts)
        if decoders:
            b, cached = len(decoders), sum(job.to_compute for job in decoders)
            time_s += c.p5 * cached + c.p6 * b + c.p7 * (cached / b) + c.p8
        if prompts and decoders:
            time_s -= min(c.p4, c.p8)
        factor = 1.0
        for since_s, value in self.slowdowns:
            if since_s <= now_s:
                factor = value
        return factor * time_s

    def _emit(self, job: Job, now_s: float, running: list[Job]) -> None:
        job.made += 1
        if job.first_s is None:
            job.first_s = now_s
        if job.made == job.output:
            job.finish_s = now_s
            running.remove(job)
            self._finished(job)

    # What an engine with a prefix cache does differently (naive_cache.py).

    def _size(self, job: Job) -> int:
        return job.to_compute

    def _scheduled(self, job: Job, tokens: int) -> None:
        pass

    def _finished(self, job: Job) -> None:
        pass
