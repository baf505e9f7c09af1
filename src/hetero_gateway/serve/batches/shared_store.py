"""PostgreSQL and S3-compatible storage, which several gateways share."""

from collections.abc import Callable
from urllib.parse import urlsplit

from hetero_gateway.errors import ConfigError
from hetero_gateway.files.batches_config import BatchesConfig
from hetero_gateway.files.secrets import password
from hetero_gateway.serve.batches.ledger import Batch, Ledger
from hetero_gateway.serve.batches.runner import InThread, Runner
from hetero_gateway.serve.batches.shared_ledger import SharedLedger, gateway_name
from hetero_gateway.serve.batches.sharing import SharedWork
from hetero_gateway.serve.batches.storage import BatchRows, Blobs, StorageUnavailable

try:
    from hetero_gateway.serve.batches.objects import Objects
    from hetero_gateway.serve.batches.postgres import PostgresDatabase
except ImportError as error:
    raise ConfigError(
        "batches.database needs its extra: pip install 'hetero-gateway[batches-shared]'"
    ) from error


class SharedBatchStore:
    """Storage that other gateways use at the same time.

    Raises:
        ConfigError: the password is missing, or such storage is impossible.
    """

    def __init__(self, config: BatchesConfig) -> None:
        assert config.database is not None
        assert config.storage is not None
        self._config = config
        self._url = config.database
        self._password = password(config.password_env, "batches.password_env")
        parts = urlsplit(config.storage)
        self.blobs: Blobs = Objects(parts.netloc, parts.path.strip("/"), config.storage_endpoint)
        self.is_here = False
        self.waits_for = "the database was not asked yet"
        self.name = gateway_name()

    def take(self) -> bool:
        rows = PostgresDatabase(self._url, self._password)
        try:
            rows.prepare()
        except StorageUnavailable as error:
            self.waits_for = str(error.strerror)
            return False
        finally:
            rows.close()
        return True

    def release(self) -> None:
        """Nothing is held."""

    def rows(self) -> PostgresDatabase:
        return PostgresDatabase(self._url, self._password)

    def ledger(self, rows: BatchRows) -> SharedLedger:
        return SharedLedger(rows, self.blobs, self._config, self.name)

    def share(
        self,
        ledger: Ledger,
        call: InThread,
        runner: Runner,
        look_at: Callable[[Batch], None],
    ) -> SharedWork:
        assert isinstance(ledger, SharedLedger)
        return SharedWork(self.rows(), self.name, ledger, call, runner, look_at)
