"""instructor: a call without a response model, as emulated text is no JSON."""

import sys
from importlib.metadata import version

import instructor
import openai

client = instructor.from_openai(openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"))
hello = [{"role": "user", "content": "Hello"}]
answer = client.chat.completions.create(
    model=sys.argv[2], messages=hello, max_tokens=8, response_model=None
)
assert answer.usage.completion_tokens == 8
print(version("instructor"), "create without a response model", sep="|")
