"""litellm (the SDK): completion, stream, a batch and its files."""

import json
import os
import sys
import tempfile
import time
from importlib.metadata import version

# Else it looks for the model's tokenizer and for prices on the internet.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

hello = [{"role": "user", "content": "Hello"}]
target = {"model": f"hosted_vllm/{sys.argv[2]}", "api_base": f"{sys.argv[1]}/v1"}
answer = litellm.completion(messages=hello, max_tokens=8, **target)
assert answer.usage.completion_tokens == 8
assert list(litellm.completion(messages=hello, max_tokens=8, stream=True, **target))

lines = [
    {
        "custom_id": f"q{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": sys.argv[2], "messages": hello, "max_tokens": 4},
    }
    for number in range(3)
]
place = {
    "custom_llm_provider": "openai",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
}
with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
    file.write("\n".join(map(json.dumps, lines)).encode())
    file.flush()
    with open(file.name, "rb") as content:
        uploaded = litellm.create_file(file=content, purpose="batch", **place)
batch = litellm.create_batch(
    completion_window="24h",
    endpoint="/v1/chat/completions",
    input_file_id=uploaded.id,
    metadata={"from": "litellm"},
    **place,
)
open_states = ("validating", "in_progress", "finalizing")
while (batch := litellm.retrieve_batch(batch_id=batch.id, **place)).status in open_states:
    time.sleep(0.1)
answers = litellm.file_content(file_id=batch.output_file_id, **place).content.splitlines()
assert {json.loads(answer)["custom_id"] for answer in answers} == {"q0", "q1", "q2"}
assert batch.id in {each.id for each in litellm.list_batches(**place).data}
assert litellm.file_delete(file_id=uploaded.id, **place).deleted
print(version("litellm"), "completion, stream, files, a batch", sep="|")
