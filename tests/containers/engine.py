"""Podman, set up so that the project's compose files start on a plain Debian machine, as root.

No image is pulled: Debian's own packages stand in, under the names that the files ask for. Base and
wheels are kept in ``${XDG_CACHE_HOME:-~/.cache}/hetero-gateway/containers``, and so are the
containers while they run: podman's own storage is left alone.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/hetero-gateway:local"
# What the Dockerfile and the compose files ask for, and what stands in for it.
PYTHON_IMAGE = "docker.io/library/python:3.11.13-slim-bookworm"
PROMETHEUS_IMAGE = "docker.io/prom/prometheus:v2.55.1"
SUITE = "bookworm"
PACKAGES = (
    "ca-certificates",
    "gcc",
    "libc6-dev",
    "prometheus",
    "python-is-python3",
    "python3",
    "python3-dev",  # as the image that this stands in for
    "python3-pip",
    "python3-venv",
    "wget",  # Prometheus' health check
)
_PROMETHEUS_FILE = f"""\
FROM {PYTHON_IMAGE}
RUN mkdir /prometheus && chown nobody /prometheus
USER nobody
VOLUME /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
"""


class Podman:
    """The engine with settings of its own; ``prepare`` makes what ours are built on."""

    def __init__(self) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.home = cache / "hetero-gateway" / "containers"
        self.wheels = self.home / "wheels"
        self.wheels.mkdir(parents=True, exist_ok=True)
        # Limits must not exceed the caller's where nobody may raise them.
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        most_processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        self.limits = {
            "nofile": 4096 if most_files < 0 else min(4096, most_files),
            "nproc": 4096 if most_processes < 0 else min(4096, most_processes),
        }
        ulimits = [f"{name}={most}:{most}" for name, most in self.limits.items()]
        settings = self._written(
            "containers.conf",
            f"[containers]\ndefault_ulimits = {ulimits}\n"
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n',
        )
        storage = self._written(
            "storage.conf",
            f'[storage]\ndriver = "overlay"\ngraphroot = "{self.home}/storage"\n'
            f'runroot = "{self.home}/run"\n',
        )
        self.pip = self._written("pip.conf", "[global]\nno-index = true\nfind-links = /index\n")
        self.environment = os.environ | {
            "CONTAINERS_CONF": str(settings),
            "CONTAINERS_STORAGE_CONF": str(storage),
        }

    def _written(self, name: str, text: str) -> Path:
        path = self.home / name
        path.write_text(text, "utf-8")
        return path

    def run(self, *words: str, within_s: float = 120.0, text: str | None = None) -> str:
        """What a command prints. Raises AssertionError, with what it said, when it fails."""
        done = self.try_run(*words, within_s=within_s, text=text)
        assert done.returncode == 0, f"podman {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def try_run(
        self, *words: str, within_s: float = 120.0, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["podman", *words],
            env=self.environment,
            input=text,
            capture_output=True,
            text=True,
            timeout=within_s,
        )

    def has(self, image: str) -> bool:
        return self.try_run("image", "exists", image).returncode == 0

    def prepare(self) -> None:
        """The images that others make, under the names that the files have for them."""
        packages, made_of = " ".join(PACKAGES), self.home / "packages.txt"
        if not (self.has(PYTHON_IMAGE) and made_of.exists() and made_of.read_text() == packages):
            self._import_base()
            made_of.write_text(packages)
        if not self.has(PROMETHEUS_IMAGE):
            words = ("build", "--format", "docker", "--tag", PROMETHEUS_IMAGE, "-")
            self.run(*words, text=_PROMETHEUS_FILE)
        self._download()

    def build_ours(self) -> None:
        """The image of docker/Dockerfile, under the name that the compose files have for it."""
        ignored = ("--ignorefile", str(ROOT / "docker" / "Dockerfile.dockerignore"))
        self.build(ROOT / "docker" / "Dockerfile", ROOT, IMAGE, *ignored)

    def build(self, dockerfile: Path, folder: Path, image: str, *options: str) -> None:
        """An image of the project's, without a network: pip finds its wheels in a folder."""
        self.run(
            *("build", "--format", "docker", "--network", "none"),
            *("--volume", f"{self.wheels}:/index:ro", "--volume", f"{self.pip}:/etc/pip.conf:ro"),
            *("--file", str(dockerfile), "--tag", image, *options, str(folder)),
            within_s=900,
        )
        self.run("image", "prune", "--force", "--external")  # also what a killed build has left

    def _import_base(self) -> None:
        with tempfile.TemporaryDirectory(dir=self.home) as folder:
            root = Path(folder) / "root"
            command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
            subprocess.run(
                [*command, SUITE, str(root), *_mirror()],
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=900,
            )
            for mark in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
                mark.unlink()  # the image that this stands in for has none
            shutil.rmtree(root / "var" / "cache" / "apt", ignore_errors=True)
            with subprocess.Popen(
                ["tar", "-C", str(root), "-cf", "-", "."], stdout=subprocess.PIPE
            ) as tar:
                subprocess.run(
                    ["podman", "import", "-", PYTHON_IMAGE],
                    env=self.environment,
                    stdin=tar.stdout,
                    check=True,
                    capture_output=True,
                    timeout=300,
                )

    def _download(self) -> None:
        """The wheels that the image is made of, for its Python, each checked by its hash."""
        for name in ("run.txt", "build.txt", "compile.txt"):
            text = (ROOT / "requirements" / name).read_text("utf-8")
            wanted = self.home / name
            # The conditions are of this Python, which may be another.
            unconditional = re.sub(r" ;[^\\\n]*", " ", text)
            if wanted.exists() and wanted.read_text("utf-8") == unconditional:
                continue
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                    *("--only-binary", ":all:", "--python-version", "3.11", "--require-hashes"),
                    *("--dest", str(self.wheels), "--requirement", "/dev/stdin"),
                ],
                input=unconditional,
                text=True,
                check=True,
                timeout=600,
            )
            wanted.write_text(unconditional, "utf-8")

    def clean(self) -> None:
        """Nothing of ours runs on."""
        self.run("rm", "--all", "--force", "--volumes", "--time", "5")
        self.run("network", "prune", "--force")
        self.run("volume", "prune", "--force")


class Project:
    """A compose file that is started as it stands, but for limits that this machine cannot give."""

    def __init__(self, podman: Podman, file: Path, folder: Path) -> None:
        self.podman = podman
        self.file = file
        document = yaml.safe_load(file.read_text("utf-8"))
        self.name = document["name"]
        self.services = [name for name in document["services"] if name != "grafana"]
        self._limits = folder / "limits.yaml"
        limited = {name: {"ulimits": podman.limits} for name in self.services}
        self._limits.write_text(yaml.safe_dump({"services": limited}), "utf-8")

    def compose(self, *words: str, within_s: float = 120.0) -> None:
        command = [sys.executable, "-m", "podman_compose", "--file", str(self.file)]
        done = subprocess.run(
            [*command, "--file", str(self._limits), *words],
            env=self.podman.environment,
            capture_output=True,
            text=True,
            timeout=within_s,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"

    def up(self) -> None:
        """Everything but Grafana, whose image Debian has nothing for."""
        self.compose("up", "--detach", *self.services)

    def down(self) -> None:
        self.compose("down", "--volumes")

    def container(self, service: str) -> str:
        return f"{self.name}_{service}_1"


def _mirror() -> list[str]:
    """Where this machine gets Debian's packages from; nothing: debootstrap's own choice."""
    for path in sorted(Path("/etc/apt").glob("sources.list*")):
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            text = file.read_text("utf-8", "replace")
            match = re.search(r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(\S+/debian)/?(?:\s|$)", text, re.M)
            if match:
                return [match[1]]
    return []
