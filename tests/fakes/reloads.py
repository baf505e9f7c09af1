"""A gateway that was started from a file, which a test changes and has read again."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from hetero_gateway.files.gateway_config import GatewayConfig, load_gateway_config
from tests.fakes.gateway_files import write
from tests.fakes.running import RunningGateway, config_for, running_gateway
from tests.fakes.vllm import FakeInstance, fake_instances


class FromFile(NamedTuple):
    path: Path
    config: GatewayConfig
    running: RunningGateway
    client: httpx.AsyncClient
    fakes: list[FakeInstance]

    def write(self, path: Path | None = None, **sections: Any) -> None:
        """The file as at the start, these sections merged over it."""
        data = self.config.model_dump(mode="json", exclude_unset=True)
        for name, section in sections.items():
            if isinstance(section, dict):
                data.setdefault(name, {}).update(section)
            else:
                data[name] = section
        write(path or self.path, data)

    async def reload(self, **sections: Any) -> dict[str, Any]:
        """Write the file, and have it read."""
        self.write(**sections)
        return await self.running.gateway.reloader.reload("a test")


@asynccontextmanager
async def from_file(
    folder: Path, instances: int = 1, workers: int = 1, verify: Any = True, **sections: Any
) -> AsyncIterator[FromFile]:
    """The gateway and a client of it, which trusts what ``verify`` says."""
    path, many = folder / "gateway.yaml", httpx.Limits(max_connections=None)
    async with fake_instances(instances) as fakes:
        config = config_for(fakes, **sections)
        write(path, config.model_dump(mode="json", exclude_unset=True))
        async with (
            running_gateway(load_gateway_config(path), path, workers) as running,
            httpx.AsyncClient(
                base_url=running.url, limits=many, timeout=None, verify=verify
            ) as client,
        ):
            yield FromFile(path, config, running, client, fakes)
