"""langchain-openai: invoke, stream."""

import sys
from importlib.metadata import version

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model=sys.argv[2], max_tokens=8)
assert chat.invoke("Hello").usage_metadata["output_tokens"] == 8
assert "".join(str(chunk.content) for chunk in chat.stream("Hello"))
print(version("langchain-openai"), "invoke, stream", sep="|")
