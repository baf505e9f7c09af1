"""llm (the command): a prompt, streamed and not."""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    entry = f"- {{model_id: gateway, model_name: {model}, api_base: {url}/v1}}\n"
    Path(folder, "extra-openai-models.yaml").write_text(entry)
    environment = os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
    for extra in ([], ["--no-stream"]):
        command = [sys.executable, "-m", "llm", "-m", "gateway", "-o", "max_tokens", "8", *extra]
        done = subprocess.run(
            [*command, "Hello"], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip()
print(version("llm"), "a prompt, streamed and not", sep="|")
