"""A cluster's engine, one step at a time and as plainly as it can be written: the yardstick.

Written from the rules in the docstrings of ``sim/engine.py`` and ``sim/block_cache.py`` alone; it
shares no code with the kernel. Every quantity is summed up anew from the sequences at every step.
Every block is an object, the free ones are a list, and what is cached is found by looking through
all of it; of jobs without keys nothing is cached.
"""

from dataclasses import dataclass, field

from hetero_gateway.core.costs.profile import Profile


@dataclass(eq=False)
class Block:
    key: int = 0
    references: int = 0


@dataclass
class Job:
    prompt: int
    output: int
    arrival_s: float
    keys: list[int] = field(default_factory=list)
    made: int = 0  # tokens emitted
    computed: int = 0  # of its prefill
    held: list[Block] = field(default_factory=list)
    decoding: bool = False
    preemptions: int = 0
    cached_tokens: int | None = None
    first_s: float | None = None
    finish_s: float | None = None
    late: bool = False  # it came while the step before this one ran

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
    queries: int = 0
    hits: int = 0

    def run(self, jobs: list[Job]) -> None:
        """Play the jobs, which are sorted by arrival, to their ends."""
        total = self.profile.kv_capacity_tokens // 16
        self.watermark = int(0.01 * total)
        self.free = [Block() for _ in range(total)]
        self.cached: list[Block] = []  # in the order of caching
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        todo, now_s = list(jobs), 0.0
        while todo or self.waiting or self.running:
            if not self.waiting and not self.running:
                now_s = max(now_s, todo[0].arrival_s)
            for job in self.waiting:
                job.late = False
            while todo and todo[0].arrival_s <= now_s:
                self.waiting.append(todo.pop(0))
                # In the order of events, a step ends before what happens at that time.
                self.waiting[-1].late = self.waiting[-1].arrival_s < now_s
            now_s = self._step(now_s)
        assert len(self.free) == total

    def _step(self, now_s: float) -> float:
        prompts: list[tuple[Job, int]] = []
        evicted = False
        if not self.chunked:
            budget = self.max_batched_tokens
            while self._can_admit():
                size = self._size(self.waiting[0])
                if prompts and size > budget:
                    break
                prompts.append((self._admit(), size))
                self._scheduled(prompts[-1][0], prompts[-1][0].to_compute)
                budget -= size
        decoders: list[Job] = []
        if self.chunked or not prompts:
            evicted = self._make_room()
            decoders = [job for job in self.running if job.decoding]
        if self.chunked:
            budget = self.max_batched_tokens - len(decoders)
            for job in self.running:
                if not job.decoding and budget > 0:
                    size = min(budget, job.to_compute - job.computed)
                    prompts.append((job, size))
                    self._scheduled(job, job.computed + size)
                    budget -= size
            while not evicted and budget > 0 and self._can_admit():
                size = min(budget, self._size(self.waiting[0]))
                prompts.append((self._admit(), size))
                self._scheduled(prompts[-1][0], prompts[-1][0].computed + size)
                budget -= size
        now_s += self._duration_s(now_s, prompts, decoders)
        for job in decoders:
            self._emit(job, now_s)
        for job, size in prompts:
            job.computed += size
            if job.computed == job.to_compute:
                # Who decodes is ordered by when it joined, among the running ones.
                self.running.remove(job)
                at = len([other for other in self.running if other.decoding])
                self.running.insert(at, job)
                job.decoding = True
                self._emit(job, now_s)
        return now_s

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
        tokens = len(decoders) + sum(size for _, size in prompts)
        if decoders and tokens < self.profile.experts_awake_at:
            time_s -= self.profile.idle_expert_s * (self.profile.experts_awake_at - tokens)
        factor = 1.0
        for since_s, value in self.slowdowns:
            if since_s <= now_s:
                factor = value
        return factor * time_s

    def _emit(self, job: Job, now_s: float) -> None:
        job.made += 1
        if job.first_s is None:
            job.first_s = now_s
        if job.made == job.output:
            job.finish_s = now_s
            self.running.remove(job)
            self._release(job, job.to_compute - 1)

    # Blocks

    def _found(self, job: Job) -> list[Block]:
        found = []
        for key in job.keys[: (job.to_compute - 1) // 16]:
            same = [block for block in self.cached if block.key == key]
            if not same:
                break
            found.append(same[0])
        return found

    def _size(self, job: Job) -> int:
        return job.to_compute - 16 * len(self._found(job))

    def _can_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.profile.max_num_seqs:
            return False
        if self.profile.plans_ahead and self.running and self.waiting[0].late:
            return False
        in_use = len([block for block in self._found(self.waiting[0]) if block.references])
        needed = blocks_for(self.waiting[0].to_compute) - in_use
        return len(self.free) - needed >= (self.watermark if self.running else 0)

    def _admit(self) -> Job:
        job = self.waiting.pop(0)
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
        self.running.append(job)
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

    def _make_room(self) -> bool:
        evicted = False
        decoding = [job for job in self.running if job.decoding]
        while sum(blocks_for(job.to_compute) - len(job.held) for job in decoding) > len(self.free):
            victim = self.running.pop()
            # What was planned of a prompt is computed; of an answer, all but the newest token.
            self._release(victim, victim.to_compute - 1 if victim.decoding else victim.computed)
            decoding = [job for job in decoding if job is not victim]
            victim.decoding = False
            victim.preemptions += 1
            self.waiting.insert(0, victim)
            evicted = True
        for job in decoding:
            self._take(job, blocks_for(job.to_compute))
        return evicted
