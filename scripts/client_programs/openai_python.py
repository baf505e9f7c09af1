"""openai: chat and stream, completions, responses, embeddings' error, models, an unknown model."""

import sys

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
print(openai.__version__, "models, chat, stream with usage, completions, responses, 404", sep="|")
