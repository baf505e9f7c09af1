"""anthropic: messages, stream, count_tokens."""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
model = sys.argv[2]
hello = [{"role": "user", "content": "Hello"}]
answer = client.messages.create(model=model, messages=hello, max_tokens=8)
assert answer.usage.output_tokens == 8
with client.messages.stream(model=model, messages=hello, max_tokens=8) as stream:
    assert "".join(stream.text_stream)
assert client.messages.count_tokens(model=model, messages=hello).input_tokens > 0
print(anthropic.__version__, "messages, stream, count_tokens", sep="|")
