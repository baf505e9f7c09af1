"""A live engine's own statements: its model, its limits, its counters.

``look_at`` asks for its description, and ``read_engine`` for everything that measuring needs, once,
before anything is measured; ``EngineClient.counters`` asks before and after every batch.
engines/vllm interprets the answers.
"""

import asyncio
from dataclasses import dataclass

import msgspec

from hetero_gateway.core.costs.profile import DEFAULT_MAX_NUM_SEQS
from hetero_gateway.engines.vllm import CacheFacts, EngineMetrics, paths, read_metrics, read_models
from hetero_gateway.engines.vllm.metrics import PREFIX
from hetero_gateway.errors import ConfigError, HeteroGatewayError
from hetero_gateway.lab.load.admin import bearer
from hetero_gateway.lab.load.client import LoadTarget
from hetero_gateway.lab.load.unreachable import why_unreachable
from hetero_gateway.plain_httpx import httpx

_TIMEOUT_S = 30.0
_ALIVE_TIMEOUT_S = 5.0
# For a long prompt on a slow engine.
_POST_TIMEOUT_S = 120.0
# A rank's metrics are 70 KB.
_MOST_BYTES = 1 << 23
_LONGEST_VERSION = 64
# For an engine that does not say (not vLLM): short enough for every model.
_UNKNOWN_MODEL_LEN = 2048
_DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Overrides:
    """The user's values: they replace the engine's, None: ask it; and those that no API has.

    ``gpu`` and ``tensor_parallel`` are for the profile's name; ``quantization`` is how the
    weights are stored, None: in 16 bits.
    """

    model: str | None = None
    kv_capacity_tokens: int | None = None
    max_model_len: int | None = None
    block_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu: str = "unknown"
    tensor_parallel: int = 1
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class EngineLook:
    """An engine's description of itself.

    Args:
        served: the models that it lists, in its order, with their context windows in tokens.
        version: the answer of /version, or "unknown".
        has_metrics: whether it has vLLM's metrics; ``cache`` is from them.
    """

    served: dict[str, int | None]
    version: str
    has_metrics: bool
    cache: CacheFacts


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The limits of a batch here, and the measured engine.

    Args:
        model: the name to ask for.
        kv_capacity_tokens: of all its data-parallel ranks together.
        max_num_seqs: given, or vLLM's default: no API has it. ``max_num_seqs_known`` says
            which.
        look: its description; without metrics, batches cannot be checked against its counters.
    """

    model: str
    max_model_len: int
    kv_capacity_tokens: int
    block_tokens: int
    max_num_seqs: int
    max_num_seqs_known: bool
    look: EngineLook


class EngineClient:
    """GETs with the engine's key.

    Raises (every method):
        HeteroGatewayError: no answer.
    """

    def __init__(self, target: LoadTarget) -> None:
        headers = bearer(target.api_key) if target.api_key else {}
        headers["accept-encoding"] = "identity"
        self.target = target
        self.url = target.base_url
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=_TIMEOUT_S)

    async def get(self, path: str) -> httpx.Response:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._get(path)
        except (httpx.HTTPError, TimeoutError) as error:
            reason = why_unreachable(self.url, error)
            raise HeteroGatewayError(f"{self.url}{path}: no answer: {reason}") from error

    async def post(self, path: str, body: bytes) -> httpx.Response:
        """A request whose body is JSON."""
        try:
            async with asyncio.timeout(_POST_TIMEOUT_S):
                return await self._asked("POST", path, body)
        except (httpx.HTTPError, TimeoutError) as error:
            reason = why_unreachable(self.url, error)
            raise HeteroGatewayError(f"{self.url}{path}: no answer: {reason}") from error

    async def _get(self, path: str) -> httpx.Response:
        return await self._asked("GET", path)

    async def _asked(self, method: str, path: str, body: bytes | None = None) -> httpx.Response:
        """An answer with its body; neither is trusted to end."""
        parts, size = [], 0
        headers = {} if body is None else {"content-type": "application/json"}
        async with self._client.stream(
            method, path, content=body, headers=headers, timeout=_POST_TIMEOUT_S
        ) as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise httpx.DecodingError("its body is encoded, which was not asked for")
            async for part in response.aiter_raw():
                parts.append(part)
                size += len(part)
                if size > _MOST_BYTES:
                    raise httpx.ReadError(f"its body is larger than {_MOST_BYTES} bytes")
        return httpx.Response(
            response.status_code, content=b"".join(parts), default_encoding="latin-1"
        )

    async def counters(self) -> EngineMetrics:
        response = await self.get(paths.METRICS)
        if response.status_code != 200:
            raise HeteroGatewayError(
                f"{self.url}{paths.METRICS}: answered {response.status_code} where it had metrics"
            )
        return read_metrics(response.text)

    async def alive(self) -> bool:
        """Whether it says so; one that does not know the question must list its models."""
        try:
            async with asyncio.timeout(_ALIVE_TIMEOUT_S):
                response = await self._get(paths.HEALTH)
                if response.status_code == 404:
                    response = await self._get(paths.MODELS)
        except (httpx.HTTPError, TimeoutError):
            return False
        return response.status_code == 200

    async def aclose(self) -> None:
        await self._client.aclose()


async def look_at(client: EngineClient) -> EngineLook:
    """Ask the engine for its models, its metrics and its version.

    Raises:
        ConfigError: it wants another key.
        HeteroGatewayError: no engine answers there.
    """
    served = await _served(client)
    metrics = await client.get(paths.METRICS)
    has_metrics = metrics.status_code == 200 and PREFIX in metrics.text
    cache = read_metrics(metrics.text if has_metrics else "").cache
    return EngineLook(served, await _version(client), has_metrics, cache)


async def read_engine(client: EngineClient, given: Overrides) -> EngineFacts:
    """Ask the engine for everything not given.

    Raises:
        ConfigError: a wrong model name or key, or a limit that neither it nor a flag gives.
        HeteroGatewayError: no engine answers there.
    """
    look = await look_at(client)
    served, cache = look.served, look.cache
    model = given.model or next(iter(served))
    if model not in served:
        raise ConfigError(
            f"--model: {client.url} does not serve {model!r}; it serves {', '.join(served)}"
        )
    capacity = given.kv_capacity_tokens or cache.capacity_tokens
    if capacity is None:
        what = "does not report the KV capacity" if look.has_metrics else "has no vLLM metrics"
        raise ConfigError(
            f"{client.url}{paths.METRICS} {what}: give --kv-capacity-tokens (vLLM logs it "
            'when it starts, as "GPU KV cache size: N tokens")'
        )
    return EngineFacts(
        model=model,
        max_model_len=given.max_model_len or served[model] or min(capacity, _UNKNOWN_MODEL_LEN),
        kv_capacity_tokens=capacity,
        block_tokens=given.block_tokens or cache.block_tokens or _DEFAULT_BLOCK_TOKENS,
        max_num_seqs=given.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
        max_num_seqs_known=given.max_num_seqs is not None,
        look=look,
    )


async def _served(client: EngineClient) -> dict[str, int | None]:
    """The served models, in the engine's order, with their context windows."""
    response = await client.get(paths.MODELS)
    url = f"{client.url}{paths.MODELS}"
    if response.status_code in (401, 403):
        given = (
            "the key that it holds was refused" if client.target.api_key else "it wants an API key"
        )
        raise ConfigError(
            f"{url}: {response.status_code}: {given}: name the environment variable that holds "
            "the key with --api-key-env"
        )
    models = read_models(response.content) if response.is_success else None
    if models is None:
        raise HeteroGatewayError(
            f"{url}: answered {response.status_code}, not a list of models: is it an "
            "OpenAI-compatible engine?"
        )
    if not models:
        raise HeteroGatewayError(f"{url}: lists no model")
    return {name: card.max_model_len for name, card in models.items()}


async def _version(client: EngineClient) -> str:
    response = await client.get(paths.VERSION)
    try:
        version = msgspec.json.decode(response.content, type=_Version).version
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "unknown"
    usable = 0 < len(version) <= _LONGEST_VERSION and version.isprintable()
    return version if usable else "unknown"


class _Version(msgspec.Struct):
    version: str
