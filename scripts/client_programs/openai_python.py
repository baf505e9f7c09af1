"""openai: chat, stream, completions, responses, models, an unknown model, a batch and its files."""

import json
import sys
import time

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
hello = [{"role": "user", "content": "Hello"}]
model = client.models.list().data[0].id
answer = client.chat.completions.create(model=model, messages=hello, max_tokens=8)
assert answer.usage.completion_tokens == 8
chunks = list(
    client.chat.completions.create(
        model=model,
        messages=hello,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
)
assert chunks[-1].usage.completion_tokens == 8
assert client.completions.create(model=model, prompt="Once", max_tokens=4).choices[0].text
assert client.responses.create(model=model, input="Hello", max_output_tokens=8).output_text
code = None
try:
    client.chat.completions.create(model="nope", messages=hello)
except openai.NotFoundError as error:
    code = error.code
assert code == "model_not_found"

lines = [
    {
        "custom_id": f"q{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": hello, "max_tokens": 4},
    }
    for number in range(3)
]
text = "\n".join(map(json.dumps, lines)).encode()
file = client.files.create(file=("in.jsonl", text), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
)
open_states = ("validating", "in_progress", "finalizing")
while (batch := client.batches.retrieve(batch.id)).status in open_states:
    time.sleep(0.1)
answers = client.files.content(batch.output_file_id).text.splitlines()
assert {json.loads(answer)["custom_id"] for answer in answers} == {"q0", "q1", "q2"}
assert client.batches.list().data[0].id == batch.id
assert client.files.delete(file.id).deleted
what = "models, chat, stream with usage, completions, responses, 404, files, a batch"
print(openai.__version__, what, sep="|")
