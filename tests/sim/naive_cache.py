"""The naive engine with a prefix cache, as plainly as it can be written: the yardstick for it.

Written from the rules in ``sim/block_cache.py``'s docstring alone: every block is an object, the
free ones are a list, and what is cached is found by looking through all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.sim.naive import Job, NaiveEngine, blocks_for


@dataclass(eq=False)
class Block:
    key: int = 0
    references: int = 0


@dataclass
class CachedJob(Job):
    keys: list[int] = field(default_factory=list)
    held: list[Block] = field(default_factory=list)
    cached_tokens: int | None = None


@dataclass
class CachingEngine(NaiveEngine):
    queries: int = 0
    hits: int = 0

    def run(self, jobs: list[Job]) -> None:
        total = self.profile.kv_capacity_tokens // 16
        self.free = [Block() for _ in range(total)]
        self.cached: list[Block] = []  # in the order of caching
        super().run(jobs)
        assert len(self.free) == total

    def _found(self, job: Job) -> list[Block]:
        found = []
        for key in job.keys[: (job.to_compute - 1) // 16]:
            same = [block for block in self.cached if block.key == key]
            if not same:
                break
            found.append(same[0])
        return found

    def _can_admit(self, total: int, waiting: list[Job], running: list[Job]) -> bool:
        if not waiting or len(running) >= self.profile.max_num_seqs:
            return False
        found = self._found(waiting[0])
        in_use = len([block for block in found if block.references])
        needed = blocks_for(waiting[0].to_compute) - in_use
        return len(self.free) - needed >= (int(0.01 * total) if running else 0)

    def _size(self, job: Job) -> int:
        return job.to_compute - 16 * len(self._found(job))

    def _admit(self, waiting: list[Job], running: list[Job]) -> Job:
        job = waiting.pop(0)
        job.held = self._found(job)
        for block in job.held:
            if not block.references:
                self.free.remove(block)
            block.references += 1
        job.computed = 16 * len(job.held)
        if job.cached_tokens is None:
            job.cached_tokens = job.computed
            self.queries += job.prompt
            self.hits += job.computed
        self._take(job, blocks_for(job.to_compute))
        running.append(job)
        return job

    def _take(self, job: Job, count: int) -> None:
        while len(job.held) < count:
            block = self.free.pop(0)
            if block.key:
                self.cached.remove(block)
                block.key = 0
            block.references = 1
            job.held.append(block)

    def _scheduled(self, job: Job, tokens: int) -> None:
        for block, key in list(zip(job.held, job.keys, strict=False))[: tokens // 16]:
            if not block.key:
                block.key = key
                self.cached.append(block)

    def _release(self, job: Job, tokens: int) -> None:
        self._scheduled(job, tokens)
        for block in reversed(job.held):
            block.references -= 1
            if not block.references:
                self.free.insert(len(self.free) if block.key else 0, block)
        job.held = []

    def _make_room(self, total: int, waiting: list[Job], running: list[Job]) -> bool:
        evicted = False
        decoding = [job for job in running if job.decoding]
        while sum(blocks_for(job.to_compute) - len(job.held) for job in decoding) > len(self.free):
            victim = running.pop()
            # What was planned of a prompt is computed; of an answer, all but the newest token.
            self._release(victim, victim.to_compute - 1 if victim.decoding else victim.computed)
            decoding = [job for job in decoding if job is not victim]
            victim.decoding = False
            victim.preemptions += 1
            waiting.insert(0, victim)
            evicted = True
        for job in decoding:
            self._take(job, blocks_for(job.to_compute))
        return evicted

    def _finished(self, job: Job) -> None:
        self._release(job, job.to_compute - 1)
