"""LlamaIndex (llama-index-llms-openai-like): complete, stream_complete."""

import sys
from importlib.metadata import version

from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=sys.argv[2],
    api_base=f"{sys.argv[1]}/v1",
    api_key="none",
    max_tokens=8,
    context_window=8192,
    is_chat_model=True,
)
assert llm.complete("Hello").text
assert list(llm.stream_complete("Hello"))
print(version("llama-index-llms-openai-like"), "complete, stream_complete", sep="|")
