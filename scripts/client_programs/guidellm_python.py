"""GuideLLM: its benchmark, with prompts from a file: a synthetic set needs a tokenizer."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

url, model = sys.argv[1:]
REQUESTS = 6
with tempfile.TemporaryDirectory() as folder:
    prompts = Path(folder, "prompts.jsonl")
    prompts.write_text("".join(json.dumps({"prompt": f"Hello {i}"}) + "\n" for i in range(20)))
    report = Path(folder, "report.json")
    subprocess.run(
        [
            *(Path(sys.executable).with_name("guidellm"), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={url},model={model}"),
            *("--profile", "kind=synchronous"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--data", f"kind=json_file,path={prompts}"),
            *("--output", f"kind=json,path={report}"),
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=sys.stderr,
        check=True,
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) >= REQUESTS, requests
    assert not requests["errored"], requests["errored"]
print(version("guidellm"), "run, one request after another, streamed", sep="|")
